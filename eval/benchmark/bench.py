"""Measure latency and peak memory of rows on one model, each round on the next batch of prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from mame_sd.diffusion.denoisers import denoiser_of
from mame_sd.runs.generate import environment
from mame_sd.runs.jobs import GenerateSettings, Job, cut_batches
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.merging import InstalledMethod
from mame_sd.runs.sampling import sample

from ..memory import allocations, most, weight_bytes
from ..timing import synchronize, timed
from .rows import Row
from .timings import Timing, timed_rounds

WARM_UP_STEPS = 2
_DECODING = "mame-sd: decoding"


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
        model: The model.
        settings: Settings of all images.
        batches: Batches of equal cost (`alike_batches`). A round takes the next one, and after the
            last the first. On a CPU, peaks of memory are those of the first.
        rows: The rows.
        rounds: Number of rounds.
        record: See `timed_rounds`.
        on_progress: Called with the number of calls done and of all calls.

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
    peaks: dict[str, dict[str, Any]] = {}

    def warm_up(name: str) -> None:
        with installed(model, by_name[name], batches[0]):
            sample(model, replace(settings, steps=min(WARM_UP_STEPS, settings.steps)), batches[0])
        # CUDA counts while it is timed, a CPU in a separate call.
        if model.pipe.device.type == "cpu":
            peaks[name] = peak_call(model, replace(settings, steps=1), batches[0], by_name[name])

    def call(name: str, number: int) -> Timing:
        row, batch = by_name[name], batches[number % len(batches)]
        timing = timed_call(model, row.sampling(settings), batch, row)
        return replace(timing, **peaks.get(name, {}))

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
        model: The model.
        settings: Settings of the row's images.
        jobs: The images of one batch.
        row: The row.

    Returns:
        Seconds per image, and peak bytes if the device counts them while it is timed (CUDA).
    """
    device = model.pipe.device
    marks: dict[str, float] = {}
    peak: dict[str, int] = {}

    def at(name: str) -> None:
        if name not in marks:
            synchronize(device)
            marks[name] = time.perf_counter()
            if name == "decoding" and device.type == "cuda":
                peak["denoising"] = torch.cuda.max_memory_allocated(device)

    with installed(model, row, jobs), _marking(model, at):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        before = time.process_time()
        _, seconds = timed(lambda: sample(model, settings, jobs), device)
        used = (time.process_time() - before) / len(jobs)
    denoising = (
        (marks["decoding"] - marks["denoising"]) / len(jobs) if "decoding" in marks else None
    )
    if device.type != "cuda":
        return Timing(seconds / len(jobs), denoising, cpu=used if device.type == "cpu" else None)
    return Timing(
        seconds / len(jobs),
        denoising,
        torch.cuda.max_memory_allocated(device),
        peak.get("denoising"),
    )


def peak_call(
    model: LoadedModel, settings: GenerateSettings, jobs: Sequence[Job], row: Row
) -> dict[str, Any]:
    """Measure the peak bytes of one call on a CPU, from the profiler's record of allocations.

    Args:
        model: The model.
        settings: Settings of the images.
        jobs: The images of one batch.
        row: The row.

    Returns:
        Peaks by the names of `Timing`, weights included.
    """

    def at(name: str) -> None:
        if name == "decoding":
            with record_function(_DECODING):
                pass

    with installed(model, row, jobs), _marking(model, at):
        steps = allocations(lambda: sample(model, settings, jobs))
    parts = [part for part in model.pipe.components.values() if isinstance(part, nn.Module)]
    weights = weight_bytes(parts)
    before = next((number for number, (name, _) in enumerate(steps) if name == _DECODING), None)
    denoising = None if before is None else weights + most(steps[:before])
    return {"allocated": weights + most(steps), "allocated_denoising": denoising}


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


@contextmanager
def _marking(model: LoadedModel, at: Callable[[str], None]) -> Iterator[None]:
    """Call `at` before each call of the denoiser ("denoising") and of the decoder ("decoding")."""
    decoder = getattr(getattr(model.pipe, "vae", None), "decoder", None)
    parts: list[tuple[str, nn.Module]] = [("denoising", denoiser_of(model.pipe))]
    if isinstance(decoder, nn.Module):
        parts.append(("decoding", decoder))
    hooks = [part.register_forward_pre_hook(lambda *_, name=name: at(name)) for name, part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
