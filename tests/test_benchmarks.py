"""The benchmarks measure what they say: gates that can fail, published architectures, work,
verdicts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import attention, methods, unets
from benchmarks.frontier import Frontier
from benchmarks.frontier_report import markdown, on_frontier, verdict
from benchmarks.generation import AttentionWork, clocked
from mame_sd.eval.rivals.plans import means
from mame_sd.eval.scoring.retrieval import TRUTHS
from mame_sd.runs.loading import LoadedModel
from tests.builders.tiny import run_unet, tiny_pipeline, tiny_unet

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


@pytest.mark.parametrize(
    ("name", "millions"), [("sd1.5", 859.5), ("sd2.1", 865.9), ("sdxl", 2567.5)]
)
def test_the_architectures_are_the_published_ones(name: str, millions: float) -> None:
    unet = unets.build(name, torch.device("meta"), torch.float32)
    assert sum(p.numel() for p in unet.parameters()) == pytest.approx(millions * 1e6, rel=1e-4)


def test_work_counts_self_attention_alone() -> None:
    unet = tiny_unet()
    with AttentionWork(7) as whole, clocked(unet) as clock:
        run_unet(unet)
    with (
        AttentionWork(7) as quarter,
        methods.rival("pool-kv", means, cell=(2, 2), min_tokens=16).on(unet),
    ):
        run_unet(unet)
    assert quarter.work * 4 == whole.work > 0
    assert clock.seconds > 0


def point(name: str, family: str, times_faster: float, lpips: float) -> dict[str, Any]:
    return {
        "name": name,
        "family": family,
        "times_faster": times_faster,
        "lpips": lpips,
        "work": 0.5,
        "psnr": 30.0,
        "ssim": 0.9,
        "retrieval": 1.0,
    }


def test_the_verdict_names_what_beats_each_rival() -> None:
    points = [
        point("baseline", "baseline", 1.0, 0.0),
        point("mild", "mame", 1.2, 0.01),
        point("strong", "mame", 1.6, 0.05),
        point("tomesd", "tomesd", 1.1, 0.02),
        point("pool", "pool", 1.7, 0.04),
    ]
    assert verdict(points) == {
        "tomesd": {"better": "mild", "faster": "mild"},
        "pool": {"better": None, "faster": None},
    }
    assert [p["name"] for p in on_frontier(points)] == ["baseline", "mild", "pool"]
    text = markdown(points)
    assert "- pool: NOT beaten" in text
    assert "- tomesd: beaten" in text
    assert "| **mild** | 1.20 |" in text
    assert "Not to be trusted" not in text
    points[1]["itself"] = 0.91
    assert f"0.91 to 0.91 times as fast as itself ({points[1]['name']})" in markdown(points)


def test_a_frontier_of_some_settings_keeps_the_rows_measured_before(tmp_path: Path) -> None:
    every = {
        "mild": methods.ours(keep=0.5, min_tokens=16),
        "strong": methods.ours(keep=0.125, min_tokens=16),
        "pool": methods.rival("pool-kv", means, cell=(2, 2), min_tokens=16),
    }
    model = LoadedModel(pipe=tiny_pipeline(), identity={"sha256": "digest"}, guidance=1.25)
    prompts = [prompt.text for prompt in TRUTHS["unet"].draw(2)]

    def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a - b).abs().mean((1, 2, 3))

    def measured(steps: int, *names: str) -> dict[str, Any]:
        with torch.no_grad():
            frontier = Frontier(
                tmp_path, model, distance, TRUTHS["unet"].retrieved, prompts, steps, 1
            )
            points = frontier.points({name: every[name] for name in names}, every)
        return {point["name"]: point for point in points}

    first = measured(1, "mild", "pool")
    assert list(first) == ["baseline", "mild", "pool"]
    assert first["baseline"]["lpips"] == 0 < first["mild"]["lpips"]
    assert first["mild"]["itself"] == first["baseline"]["times_faster"], (
        "the baseline is timed beside itself"
    )
    (again,) = tmp_path.glob("points/mild-*.json")
    again.unlink()
    only = measured(1, "mild", "strong")
    assert list(only) == ["baseline", "mild", "strong", "pool"]
    assert only["pool"] == first["pool"]
    assert again.exists(), "what is named and lacks its file is measured"
    assert list(measured(2, "strong")) == ["baseline", "strong"], (
        "rows of other steps are of another table"
    )
