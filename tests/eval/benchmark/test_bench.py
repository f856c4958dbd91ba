"""Latency and memory of rows, timed on batches of equal cost and resumed; and the ceiling gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mame_sd.config import MaMeConfig
from mame_sd.eval.benchmark import bench as bench_module
from mame_sd.eval.benchmark import timings
from mame_sd.eval.benchmark.bench import alike_batches, peak_call, timed_call
from mame_sd.eval.benchmark.gates import ceiling_gate, unrelated_pairs
from mame_sd.eval.benchmark.rows import Row
from mame_sd.eval.benchmark.timings import Timing, summary
from mame_sd.eval.metric_list import METRICS
from mame_sd.eval.metrics.lpips import Lpips
from mame_sd.eval.results.schema import Value
from mame_sd.eval.scoring.per_image import pair_values
from mame_sd.eval.scoring.runs import Run
from mame_sd.eval.scoring.tools import Tools
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.merging import Merging
from tests.builders import seeded
from tests.builders.benchmarks import PROMPTS, SETTINGS, tiny_rows
from tests.builders.metrics import oracle
from tests.builders.run_folders import write_run


def test_timings_continue_and_start_over_when_anything_else_is_timed(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tiny_rows()[::3]
    batches = alike_batches(jobs_of(PROMPTS, SETTINGS), 1)[:2]
    record = tmp_path / "bench.jsonl"
    seen: list[tuple[str, str]] = []

    def watched(model: LoadedModel, settings: Any, jobs: Any, row: Row) -> Timing:
        seen.append((jobs[0].name, row.name))
        return Timing(float(len(seen)))

    monkeypatch.setattr(bench_module, "timed_call", watched)
    monkeypatch.setattr(bench_module, "peak_call", lambda *_: 7)

    def timed(rounds: int, rows: Sequence[Row] = rows, steps: int = 1) -> tuple[list[int], Any]:
        counts: list[int] = []
        found = bench_module.bench(
            model, GenerateSettings(steps=steps), batches, rows, rounds, record,
            lambda done, total: counts.append(done),
        )  # fmt: skip
        return counts, found

    counts, found = timed(2)
    assert counts == list(range(5))
    assert found == {
        "baseline": [Timing(1.0, allocated=7), Timing(4.0, allocated=7)],
        "mame-default": [Timing(2.0, allocated=7), Timing(3.0, allocated=7)],
    }
    names = [row.name for row in rows]
    assert seen == [
        *(("p00001_0", name) for name in names),
        *(("p00002_0", name) for name in names[::-1]),
    ], "another prompt in each round, and every row on it"
    counts, again = timed(3)
    assert counts == [4, 5, 6]
    assert {name: timings[:2] for name, timings in again.items()} == found
    whole = record.read_text().splitlines(keepends=True)
    record.write_text("".join(whole[:6]))  # stopped within the third round
    assert timed(3)[0] == [4, 5, 6], "a round of which a part is missing is timed as a whole"
    assert timed(1, steps=2)[0] == [0, 1, 2]
    changed = replace(rows[1], method=Merging(MaMeConfig(keep=0.25, min_tokens=16)))
    assert timed(1, [rows[0], changed], 2)[0] == [0, 1, 2]


def test_batches_that_are_timed_are_of_one_kind_and_length() -> None:
    negatives = [None, None, None, "red", None, None]
    prompts = [
        replace(prompt, id=str(n), negative_prompt=negative)
        for n, (prompt, negative) in enumerate(zip(PROMPTS * 2, negatives, strict=True))
    ]
    batches = alike_batches(jobs_of(prompts, SETTINGS), 2)
    assert [[job.prompt.id for job in batch] for batch in batches] == [["0", "1"], ["4", "5"]]


def test_a_call_is_timed_and_its_peak_is_the_highest_of_all_rounds(model: LoadedModel) -> None:
    settings, row = GenerateSettings(steps=2, batch_size=2), tiny_rows()[0]
    timing = timed_call(model, settings, jobs_of(PROMPTS[:2], SETTINGS), row)
    assert timing.seconds > 0
    assert summary([timing] * 3, [timing] * 3)["cpu"].mean == timing.cpu
    high = [replace(timing, allocated=n * 2**20) for n in (3, 2)]
    assert summary(high, high)["memory"].mean == 3


def test_peaks_on_a_cpu_count_weights_and_grow_with_the_batch(model: LoadedModel) -> None:
    one, three = (
        peak_call(model, GenerateSettings(steps=1), jobs_of(PROMPTS[:n], SETTINGS), tiny_rows()[0])
        for n in (1, 3)
    )
    parts = (model.pipe.unet, model.pipe.vae, model.pipe.text_encoder)
    weights = sum(p.numel() * 4 for part in parts for p in part.parameters())
    assert weights < one < three


def test_seconds_of_a_busy_machine_are_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "LARGEST_SPREAD", 0.25)
    monkeypatch.setattr(timings, "SMALLEST_SHARE", 0.6)

    def gate(*rounds: tuple[float, float]) -> bool:
        found = {"baseline": [Timing(seconds, cpu=cpu) for seconds, cpu in rounds]}
        return bool(timings.timing_gate(found, "baseline", cores=2).passed)

    assert gate((1.0, 1.9), (1.1, 1.9), (1.0, 1.9))
    assert not gate((1.0, 1.9)), "one round tells nothing"
    assert not gate((1.0, 1.9), (1.5, 1.9)), "rounds that differ"
    assert not gate((1.0, 0.9), (1.0, 0.9)), "a process that waits for its cores"
    baseline, found = [Timing(9.0, cpu=6.0)] * 2, [Timing(1.0, cpu=2.0)] * 2
    costs = summary(found, baseline, withhold_seconds=True)
    busy = Value(n=2, withheld="the machine was busy")
    assert costs["latency"] == busy
    assert costs["cpu"].mean == 2.0
    assert (costs["speedup"].mean, costs["speedup"].remark) == (3.0, "of CPU time")
    assert summary([Timing(1.0)] * 2, baseline, withhold_seconds=True)["speedup"] == busy


def test_a_row_is_compared_with_the_baseline_of_its_own_round() -> None:
    rounds = [
        Timing(seconds) for seconds in (1.0, 4.0, 2.0, 8.0, 16.0)
    ]  # other prompts, other load
    half = [Timing(timing.seconds / 2) for timing in rounds]
    fast = summary(half, rounds)["speedup"]
    assert (fast.mean, fast.low, fast.high, fast.n) == (2.0, 2.0, 2.0, 5)
    half[0] = Timing(0.25)
    fast = summary(half, rounds)["speedup"]
    assert (fast.mean, fast.low, fast.high) == (2.0, 2.0, 4.0)
    once = summary(half[:1], rounds[:1])["speedup"]
    assert (once.mean, once.interval) == (4.0, None)


def test_the_ceiling_gate_fails_when_any_method_is_as_far_as_another_prompt(tmp_path: Path) -> None:
    shapes = oracle("lpips")["alex"]["shapes"]
    network = Lpips(seeded.weights({name: tuple(shape) for name, shape in shapes.items()}))
    pictures = {f"{n}_0": seeded.picture(f"ceiling {n}", 64, 64) for n in range(3)}
    baseline = Run.open(write_run(tmp_path / "run", pictures))
    tools = Tools(networks={"lpips-alex": network})
    metrics = [METRICS["psnr"], METRICS["lpips"]]
    unrelated = pair_values(metrics, unrelated_pairs(baseline), tools)
    ceiling = {name: sum(values.values()) / 3 for name, values in unrelated.items()}

    def passes(**factors: float) -> bool:
        """With one method that equals the baseline, and one at so many times the ceiling."""
        equal = {"psnr": Value(mean=math.inf), "lpips": Value(mean=0.0)}
        other = {name: Value(mean=ceiling[name] * factor) for name, factor in factors.items()}
        gate = ceiling_gate(baseline, [METRICS[name] for name in factors], [equal, other], tools)
        assert gate is not None
        return gate.passed

    assert passes(psnr=1.1, lpips=0.9)
    assert not passes(psnr=0.9, lpips=0.9)
    assert not passes(psnr=1.1, lpips=1.1)
    for name in ceiling:
        assert not passes(**{name: 1.0})
