"""The benchmarks measure what they say: gates that can fail, published architectures, work,
verdicts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import attention, caches, methods, unets
from benchmarks.caching import DeepCache, calibrated, first_block, pyramid
from benchmarks.frontier import Frontier
from benchmarks.frontier_report import markdown, on_frontier, verdict
from benchmarks.generation import AttentionWork, clocked
from benchmarks.timing import captured, interleaved
from mame_sd import MaMeConfig
from mame_sd.diffusion.apply_denoiser import has_hooks
from mame_sd.eval.rivals.plans import means
from mame_sd.eval.scoring.retrieval import TRUTHS
from mame_sd.runs.loading import LoadedModel
from tests.builders.tiny import run_unet, tiny_pipeline, tiny_unet
from tests.matrix.caches import TRANSFORMERS

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


def test_each_method_is_called_once_a_round_on_an_input_of_its_own() -> None:
    seen: dict[str, list[int]] = {"a": [], "b": []}
    fresh = iter(range(100))
    times = interleaved({n: v.append for n, v in seen.items()}, lambda: next(fresh), 3, CPU)
    assert {n: len(v) for n, v in seen.items()} == {"a": 4, "b": 4}
    assert sorted(seen["a"] + seen["b"]) == list(range(8))
    assert all(len(t.seconds) == 3 for t in times.values())
    assert captured(10.0, 4.0, 4.0) == 1
    assert captured(10.0, 10.0, 4.0) == 0


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


def test_caches_are_measured_alone_and_with_merging_and_taken_off_again(tmp_path: Path) -> None:
    config = MaMeConfig(min_tokens=60)
    names = {"DeepCache 3": DeepCache(3), "PyramidAttentionBroadcast": pyramid()}

    def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a - b).abs().mean((1, 2, 3))

    def measured() -> tuple[Any, Any]:
        model = LoadedModel(pipe=tiny_pipeline(), identity={"sha256": "digest"}, guidance=2.0)
        found = caches.Caches(tmp_path, model, distance, ["a red key", "a blue ant"], rounds=2)
        rows = [caches.Row("neither"), caches.Row("merging", merging=config)]
        for name, cache in names.items():
            rows += [caches.Row(name, cache), caches.Row(f"{name} + merging", cache, config)]
        with torch.no_grad():
            tables = (
                found.table(caches.Scene("steps", 3), rows),
                found.table(caches.Scene("changed", 3, 0.7), rows[:2]),
            )
        assert not has_hooks(model.pipe)
        assert not hasattr(model.pipe, "deep_cache")
        return tables

    first, changed = measured()
    rows = first["rows"]
    assert rows["neither"]["lpips"]["mean"] == 0 < rows["merging"]["lpips"]["mean"]
    assert rows["merging"]["computed"] == 1
    assert 0 < rows["DeepCache 3 + merging"]["computed"] < 1
    assert rows["DeepCache 3"]["computed"] is None
    assert rows["DeepCache 3 + merging"]["on_cache"] > 0
    assert changed["rows"]["merging"]["lpips"]["mean"] > 0
    text = caches.markdown(first) + caches.markdown(changed)
    assert "nothing was left to gain" in text
    assert "### 3 steps of an image, strength 0.7" in text
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    assert measured() == (first, changed), "what is there is not measured again"
    assert {
        file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()
    } == files


def test_magcache_takes_the_ratios_that_it_prints_and_a_cache_that_fails_alone_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = next(row for row in TRANSFORMERS if row.name == "Stable Diffusion 3")
    model = row.build()
    ratios = calibrated(model, 4, lambda: row.run(model))
    assert ratios[0] == 1
    assert len(ratios) == 4
    with pytest.raises(ValueError, match="print 5 ratios"):
        calibrated(model, 5, lambda: row.run(model))
    pipe = LoadedModel(pipe=tiny_pipeline(), identity={"sha256": "digest"}, guidance=2.0)
    measured = caches.Caches(tmp_path, pipe, torch.dist, ["a red key"], rounds=1)
    with torch.no_grad():
        assert measured._failure(pyramid(), caches.Scene("steps", 2)) is None
        assert "pop from empty list" in str(
            measured._failure(first_block(0.05), caches.Scene("steps", 2))
        )
        rows = measured.rows(caches.Scene("steps", 2), MaMeConfig(), "deep", together=True)
    assert [row.name for row in rows] == [
        "neither",
        "merging",
        "DeepCache 2",
        "DeepCache 2 + merging",
        "DeepCache 3",
        "DeepCache 3 + merging",
    ]
