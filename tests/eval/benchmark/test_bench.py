"""Latency and memory of rows, timed on batches of equal cost and resumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mame_sd.config import MaMeConfig
from mame_sd.eval.benchmark import bench as bench_module
from mame_sd.eval.benchmark.bench import alike_batches, peak_call, timed_call
from mame_sd.eval.benchmark.rows import Row
from mame_sd.eval.benchmark.timings import Timing, summary
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.merging import Merging
from tests.builders.benchmarks import PROMPTS, SETTINGS, tiny_rows


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
    busy, unmerged = [Timing(9.0, cpu=2.0)] * 2, [Timing(9.0, cpu=6.0)] * 2
    assert summary(busy, unmerged)["speedup"].mean == 3, "other programs hardly change CPU seconds"
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
