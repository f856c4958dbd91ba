"""Latency and memory of rows: timed on alike batches, resumed round by round, and of nothing
else.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.eval.benchmark import timings
from mame_sd.eval.benchmark.bench import alike_batches, bench, peak_call, timed_call
from mame_sd.eval.benchmark.results import check_out
from mame_sd.eval.benchmark.rows import Row
from mame_sd.eval.benchmark.timings import FORMAT, Timing, check_record, summary
from mame_sd.eval.results.schema import Value
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.methods import Merging
from mame_sd.runs.prompt_files import prompts_from_texts
from tests.builders.benchmarks import PROMPTS, SETTINGS, tiny_rows


def test_timings_continue_and_start_over_when_anything_else_is_timed(
    model: LoadedModel, tmp_path: Path
) -> None:
    rows = [row for row in tiny_rows() if row.family != "tomesd"]
    one_step = GenerateSettings(steps=1)
    batches = alike_batches(jobs_of(PROMPTS, SETTINGS), 1)
    record = tmp_path / "bench.jsonl"

    def timed(rounds: int, settings: GenerateSettings = one_step) -> tuple[list[int], Any]:
        counts: list[int] = []
        found = bench(
            model, settings, batches, rows, rounds, record, lambda done, total: counts.append(done)
        )
        return counts, found

    counts, found = timed(2)
    assert counts == list(range(7))
    assert {name: len(timings) for name, timings in found.items()} == {row.name: 2 for row in rows}
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    forward = ["baseline", "mame-tau", "mame-default"]
    assert [line["method"] for line in lines[1:]] == [*forward, *forward[::-1]]
    assert [line["round"] for line in lines[1:]] == [0, 0, 0, 1, 1, 1]
    counts, again = timed(3)
    assert counts == [6, 7, 8, 9]
    assert {name: timings[:2] for name, timings in again.items()} == found
    whole = record.read_text().splitlines(keepends=True)
    record.write_text("".join(whole[:9]))  # stopped within the third round
    assert timed(3)[0] == [6, 7, 8, 9], "a round of which a part is missing is timed as a whole"
    assert timed(1, SETTINGS)[0] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{broken",
        "[1, 2]",
        '{"a": 1}',
        '{"format": "mame-sd timings 0"}',
        f'{{"format": "{FORMAT}"}}\n{{"foreign": 1}}',
        f'{{"format": "{FORMAT}"}}\n{{"round": 0, "method": "baseline", "seconds": "two"}}',
    ],
)
def test_a_file_that_is_no_record_of_timings_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    (tmp_path / "bench.jsonl").write_text(text)
    (tmp_path / "runs").mkdir()
    for check in (lambda: check_record(tmp_path / "bench.jsonl"), lambda: check_out(tmp_path)):
        with pytest.raises(
            UserError,
            match=r"bench.jsonl: expected timings \('mame-sd timings 2'\), got another file",
        ):
            check()
    assert (tmp_path / "bench.jsonl").read_text() == text


def test_each_round_times_another_prompt_and_every_method_on_it(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mame_sd.eval.benchmark.bench as module

    seen: list[tuple[str, str]] = []

    def watched(model: LoadedModel, settings: Any, jobs: Any, row: Row) -> Any:
        seen.append((jobs[0].name, row.name))
        return timed_call(model, settings, jobs, row)

    monkeypatch.setattr(module, "timed_call", watched)
    one_step, rows = GenerateSettings(steps=1), tiny_rows()[::3]
    bench(
        model,
        one_step,
        alike_batches(jobs_of(PROMPTS, one_step), 1),
        rows,
        4,
        tmp_path / "bench.jsonl",
    )
    names = ["p00001_0", "p00002_0", "p00003_0", "p00001_0"]
    assert [name for name, _ in seen[::2]] == [name for name, _ in seen[1::2]] == names
    assert {method for _, method in seen[2:4]} == {"baseline", "mame-default"}


def test_batches_that_are_timed_are_of_one_size_and_length() -> None:
    sizes = [64, 64, 64, 128, 64, 64]
    prompts = [
        replace(prompt, id=str(n), width=size)
        for n, (prompt, size) in enumerate(zip(PROMPTS * 2, sizes, strict=True))
    ]
    batches = alike_batches(jobs_of(prompts, SETTINGS), 2)
    assert [[job.prompt.id for job in batch] for batch in batches] == [["0", "1"], ["4", "5"]]


@pytest.mark.parametrize("other", ["prompt", "config", "rows"])
def test_timings_of_other_work_are_not_taken_for_these(
    model: LoadedModel, tmp_path: Path, other: str
) -> None:
    baseline, _, _, default = tiny_rows()
    one_step, record = GenerateSettings(steps=1), tmp_path / "bench.jsonl"
    batches = [jobs_of(prompts_from_texts(["key"]), one_step)]
    rows = [baseline] if other == "rows" else [baseline, default]
    bench(model, one_step, batches, rows, 1, record)
    changed = replace(default, method=Merging(MaMeConfig(keep=0.25, min_tokens=16)))
    rows = [baseline, changed if other == "config" else default]
    if other == "prompt":
        batches = [jobs_of(prompts_from_texts(["ant"]), one_step)]
    counts: list[int] = []
    bench(model, one_step, batches, rows, 1, record, lambda done, total: counts.append(done))
    assert counts == [0, 1, 2]


def test_timed_calls_measure_denoising_apart(model: LoadedModel) -> None:
    jobs = jobs_of(PROMPTS[:2], SETTINGS)
    timing = timed_call(model, GenerateSettings(steps=4, batch_size=2), jobs, tiny_rows()[0])
    assert timing.denoising is not None
    assert 0 < timing.denoising < timing.seconds
    costs = summary([timing, timing, timing])
    second = timing.seconds
    assert costs["latency"] == Value(
        mean=second, low=second, high=second, n=3, statistic="median, quartiles"
    )
    assert costs["cpu"].mean == timing.cpu
    once = summary([timing])["latency"]
    assert (once.low, once.high) == (None, None), "one round has no interval"


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
    costs = timings.without_seconds(summary([Timing(1.0, 0.5, cpu=2.0)] * 2))
    assert costs["latency"] == Value(n=2, withheld="the machine was busy")
    assert costs["denoising"].mean is None
    assert costs["cpu"].mean == 2.0


def test_peak_memory_counts_weights_and_grows_with_the_batch(model: LoadedModel) -> None:
    one, two = (
        peak_call(
            model,
            GenerateSettings(steps=1, batch_size=n),
            jobs_of(PROMPTS[:n], SETTINGS),
            tiny_rows()[0],
        )
        for n in (1, 3)
    )
    weights = sum(
        p.numel() * 4
        for part in (model.pipe.unet, model.pipe.vae, model.pipe.text_encoder)
        for p in part.parameters()
    )
    for peak in (one, two):
        assert peak.allocated is not None
        assert peak.allocated_denoising is not None
        assert weights < peak.allocated_denoising <= peak.allocated
    assert two.allocated_denoising > one.allocated_denoising  # type: ignore[operator]
