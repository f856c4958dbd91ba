"""Measure nearness and cost of rows on a model that is no text-to-image pipeline.

The model makes samples from a seed, as a published UNet of terrain and a small transformer of
photographs do. Samples are compared as floats, so differences too small for 8-bit images count. In
each draw every row makes a batch of samples, one row right after another, so that draws are also
the rounds of timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.runs.generate import environment
from mame_sd.runs.jobs import GenerateSettings, Job
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.merging import Merging, NotApplicable
from mame_sd.runs.prompt_files import Prompt

from ..results.schema import Value
from ..runner import Store, measure_cases
from ..stats import mean_interval, median_interval
from ..timing import seconds_of
from .bench import installed
from .rows import BASELINE, Row

FORMAT = "mame-sd samples 1"
LARGEST = 200.0  # dB, of samples that are equal


@dataclass(frozen=True)
class Sampler:
    """A loaded model.

    Attributes:
        module: what methods are installed on.
        sample: takes the number of a draw and the number of steps, and returns samples [N, ...] in
            -1..1.
        identity: JSON values that identify this model.
        time: axis of a sample's frames. If None, samples are no clips.
    """

    module: nn.Module
    sample: Callable[[int, int], Tensor]
    identity: Mapping[str, Any]
    time: int | None = None


def measure_samples(
    sampler: Sampler,
    rows: Sequence[Row],
    draws: int,
    steps: int,
    record: Path,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
    on_note: Callable[[str], object] = lambda note: None,
    seed: int = 0,
) -> dict[str, dict[str, Value]]:
    """Measure rows on a model, in turns.

    Args:
        sampler: the model.
        rows: the rows; the first one is the baseline. Rows that the model can't run are left out.
        draws: number of batches of samples. The draw's number, which begins at `seed`, is also the
            seed of merging's draws.
        steps: denoising steps of a sample. Rows that would have none are left out.
        record: JSON lines that hold every draw as soon as it ends; a stopped call continues with
            it.
        on_progress: called with the number of calls done and of all calls.
        on_note: called with the reason for each row that is left out.
        seed: number of the first draw.

    Returns:
        By row the values of "psnr" (mean of draws), "cpu" and "speedup" (medians), and of clips
        "psnr_changes", the PSNR of the differences between neighbouring frames.

    Raises:
        UserError: nothing merges in a row of ours.
    """
    device = next(sampler.module.parameters()).device
    model = LoadedModel(pipe=sampler.module, identity=dict(sampler.identity), guidance=None)
    settings = GenerateSettings(steps=steps)
    able = {row.name: row for row in rows if row.fewer < steps and row.lacking is None}
    numbers = range(seed, seed + draws)

    def made(name: str, number: int) -> tuple[Tensor, float]:
        row = able[name]
        if isinstance(row.method, Merging):  # drawn anew, as rivals do
            config = row.method.config.replace(seed=number)
            row = replace(row, method=Merging(config))
        job = Job(Prompt(id=str(number), text=""), 0, number, None)
        taken = row.sampling(settings).steps
        with torch.inference_mode(), installed(model, row, [job]) as method:
            samples, seconds = seconds_of(lambda: sampler.sample(number, taken), device)
            if method is not None:
                method.levels()  # raises if nothing merged
            return samples, seconds

    for name in list(able):
        try:
            made(name, seed)
        except NotApplicable as error:
            on_note(f"left out: {name} ({error})")
            del able[name]
    about = {
        "model": sampler.identity,
        "steps": steps,
        "seed": seed,
        "environment": environment(device),
        "methods": {row.name: row.config for row in able.values()},
    }
    store = Store(record, FORMAT, "samples", about, ("draw", "row"), fresh=True)

    def measure(number: int, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        by_row = {}
        for name in names:
            samples, seconds = made(name, number)
            by_row[name] = samples, {"cpu": seconds}
            yield name, by_row[name][1]
        reference = by_row[BASELINE][0]
        for samples, line in by_row.values():  # lines are kept when all rows are there
            line["psnr"] = decibels(samples, reference)
            if sampler.time is not None:
                changes = samples.diff(dim=sampler.time), reference.diff(dim=sampler.time)
                line["psnr_changes"] = decibels(*changes)

    measure_cases(
        store, numbers, list(able), measure, lambda draw, row: {"draw": draw, "row": row},
        together=True, on_progress=on_progress,
    )  # fmt: skip
    return {name: _values(store.lines, name, numbers) for name in able}


def decibels(samples: Tensor, reference: Tensor) -> float:
    """Return the PSNR of samples in -1..1, in dB, at most LARGEST."""
    error = (samples - reference).double().square().mean().item()
    return min(LARGEST, 10 * torch.tensor(4 / error).log10().item()) if error else LARGEST


def _values(lines: Mapping[Any, Mapping[str, Any]], name: str, numbers: range) -> dict[str, Value]:
    """Return the metrics of a row from the lines of its draws and the baseline's."""

    def of_draws(values: Sequence[float]) -> Value:
        median, low, high = median_interval(values)
        return Value(mean=median, low=low, high=high, n=len(values))

    own = {str(number): lines[number, name] for number in numbers}
    values = {}
    for metric in ("psnr", "psnr_changes") if name != BASELINE else ():
        near = {number: line[metric] for number, line in own.items() if metric in line}
        if near:
            values[metric] = Value(**mean_interval(near, {number: number for number in near}))
    seconds = [line["cpu"] for line in own.values()]
    base = [lines[number, BASELINE]["cpu"] for number in numbers]
    ratios = [b / o for b, o in zip(base, seconds, strict=True)]
    return {**values, "cpu": of_draws(seconds), "speedup": of_draws(ratios)}
