"""Measure latency and peak memory of rows on one model, each round on the next batch of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from torch import nn

from mame_sd.runs.generate import environment
from mame_sd.runs.jobs import GenerateSettings, Job, cut_batches
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.merging import InstalledMethod
from mame_sd.runs.sampling import sample

from ..timing import peak_bytes, weight_bytes
from .rows import Row
from .timings import Timing, timed_rounds, timing_of

WARM_UP_STEPS = 2


def bench(
    model: LoadedModel,
    settings: GenerateSettings,
    batches: Sequence[Sequence[Job]],
    rows: Sequence[Row],
    rounds: int,
    record: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[Timing]]:
    """Time rows in turns.

    Args:
        model: the model.
        settings: settings of all images.
        batches: batches of equal cost (`alike_batches`). A round takes the next one, and after the
            last the first. On a CPU, peaks of memory are those of the first.
        rows: the rows.
        rounds: number of rounds.
        record: see `timed_rounds`.
        on_progress: called with the number of calls done and of all calls.

    Returns:
        The timings of each row, round by round.
    """
    about = {
        "environment": environment(model.pipe.device),
        "model": model.identity,
        "settings": asdict(settings),
        "batches": [[asdict(job) for job in batch] for batch in batches],
        "methods": {row.name: row.config for row in rows},
    }
    by_name = {row.name: row for row in rows}
    peaks: dict[str, int] = {}

    def warm_up(name: str) -> None:
        with installed(model, by_name[name], batches[0]):
            sample(model, replace(settings, steps=min(WARM_UP_STEPS, settings.steps)), batches[0])
        # CUDA counts while it is timed, a CPU in a separate call.
        if model.pipe.device.type == "cpu":
            one = replace(settings, steps=1)
            peaks[name] = peak_call(model, one, batches[0], by_name[name])

    def call(name: str, number: int) -> Timing:
        row, batch = by_name[name], batches[number % len(batches)]
        timing = timed_call(model, row.sampling(settings), batch, row)
        return replace(timing, allocated=peaks.get(name, timing.allocated))

    return timed_rounds(
        list(by_name), rounds, call, record, about, warm_up=warm_up, on_progress=on_progress
    )


def alike_batches(jobs: Sequence[Job], batch_size: int) -> list[list[Job]]:
    """Return the batches of a run that cost the same.

    They are the longest ones, all with or all without negative prompts.
    """
    batches = cut_batches(jobs, batch_size)
    first = max(batches, key=len)
    return [
        batch
        for batch in batches
        if len(batch) == len(first) and batch[0].steered == first[0].steered
    ]


def timed_call(
    model: LoadedModel, settings: GenerateSettings, jobs: Sequence[Job], row: Row
) -> Timing:
    """Time one call of the pipeline with the row's method installed, on an idle device.

    Args:
        model: the model.
        settings: settings of the row's images.
        jobs: the images of one batch.
        row: the row.
    """
    with installed(model, row, jobs):
        return timing_of(lambda: sample(model, settings, jobs), len(jobs), model.pipe.device)


def peak_call(model: LoadedModel, settings: GenerateSettings, jobs: Sequence[Job], row: Row) -> int:
    """Measure the peak bytes of one call on a CPU, weights included; arguments as `timed_call`."""
    with installed(model, row, jobs):
        allocated = peak_bytes(lambda: sample(model, settings, jobs))
    parts = [part for part in model.pipe.components.values() if isinstance(part, nn.Module)]
    return weight_bytes(parts) + allocated


@contextmanager
def installed(
    model: LoadedModel, row: Row, jobs: Sequence[Job]
) -> Iterator[InstalledMethod | None]:
    """Install a row's method on the model for a `with` block, ready for `jobs`.

    Yields None for the baseline.
    """
    method = None if row.method is None else row.method.install(model)
    try:
        if method is not None:
            method.begin(jobs)
        yield method
    finally:
        if method is not None:
            method.remove()
