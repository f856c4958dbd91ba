"""The benchmarks measure what they say: gates that can fail, published architectures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import attention, methods, unets
from benchmarks.frontier import Frontier, table
from mame_sd.eval.rivals.plans import means
from mame_sd.eval.scoring.retrieval import TRUTHS
from mame_sd.runs.loading import LoadedModel
from tests.builders.tiny import tiny_pipeline

CPU = torch.device("cpu")


def test_attention_is_timed_beside_all_keys_and_what_computes_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = attention.row(64, 1, CPU, torch.float32, 2)
    for keep in attention.KEEPS:
        low, median, high = found[str(keep)]
        assert 0 < low <= median <= high
    fault = torch.float32  # computes nothing in it
    monkeypatch.setattr(attention, "attention", lambda q, *rest, keep: q * (q.dtype != fault))
    with pytest.raises(SystemExit, match="expected float64's output"):
        attention.row(64, 1, CPU, fault, 1)


@pytest.mark.parametrize(("name", "millions"), [("sd1.5", 859.5), ("sdxl", 2567.5)])
def test_the_architectures_are_the_published_ones(name: str, millions: float) -> None:
    unet = unets.build(name, torch.device("meta"), torch.float32)
    assert sum(p.numel() for p in unet.parameters()) == pytest.approx(millions * 1e6, rel=1e-4)


def test_a_table_warns_of_times_of_a_busy_machine() -> None:
    point = {"lpips": 0.01, "psnr": 30.0, "ssim": 0.9, "retrieval": 1.0, "itself": 1.0}
    points = [{**point, "name": "slow", "times_faster": 1.2}]
    points.append({**point, "name": "fast", "times_faster": 1.6})
    points.reverse()
    text = table(points)
    assert text.index("| slow | 1.20 | 0.01000 | 30.0 |") < text.index("| fast | 1.60 |")
    assert "Not to be trusted" not in text
    points[1]["itself"] = 0.91
    assert "0.91 to 0.91 times as fast as itself (slow)" in table(points)


def test_a_frontier_of_some_settings_keeps_the_rows_measured_before(tmp_path: Path) -> None:
    every = {
        "mild": methods.ours(keep=0.5, min_tokens=16),
        "strong": methods.ours(keep=0.125, min_tokens=16),
        "pool": methods.rival(means, cell=(2, 2), min_tokens=16),
    }
    model = LoadedModel(pipe=tiny_pipeline(), identity={"sha256": "digest"}, guidance=1.25)
    prompts = [prompt.text for prompt in TRUTHS["unet"].draw(1)]

    def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a - b).abs().mean((1, 2, 3))

    def measured(steps: int, *names: str) -> dict[str, Any]:
        frontier = Frontier(tmp_path, model, distance, TRUTHS["unet"].retrieved, prompts, steps, 1)
        points = frontier.points({name: every[name] for name in names}, every)
        return {point["name"]: point for point in points}

    first = measured(1, "mild", "pool")
    assert list(first) == ["baseline", "mild", "pool"]
    assert first["baseline"]["lpips"] == 0 < first["mild"]["lpips"]
    assert first["mild"]["itself"] == first["baseline"]["times_faster"], (
        "the baseline is timed beside itself"
    )
    only = measured(1, "mild", "strong")
    assert list(only) == ["baseline", "mild", "strong", "pool"]
    assert {name: only[name] for name in first} == first
    assert list(measured(2)) == ["baseline"], "rows of other steps are of another table"
