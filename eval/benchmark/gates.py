"""Sanity gates of a benchmark: does it measure what it says?

They run on the first images of every benchmark.

The baseline made again must be the baseline, and merging's hooks, installed but switched off, must
change nothing. What they differ by otherwise is the noise floor. Two images that have nothing to do
with each other give the ceiling. A method that is as far from the baseline as that has kept nothing
of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mame_sd.config import MaMeConfig
from mame_sd.runs.jobs import GenerateSettings, Job
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.merging import Merging
from mame_sd.runs.sampling import sample

from ..images import load_image, to_float
from ..metric_list import Metric
from ..metrics.psnr import psnr
from ..results.schema import Gate, Value
from ..scoring.per_image import pair_values
from ..scoring.runs import Pair, Run
from ..scoring.tools import Tools
from ..stats import mean_interval

NOISE_FLOOR = 60.0  # dB: a few pixels off by one in 8 bits


def repeat_gates(
    model: LoadedModel,
    settings: GenerateSettings,
    batches: Sequence[Sequence[Job]],
    baseline: Run,
    config: MaMeConfig,
) -> list[Gate]:
    """Some batches made again, as they were and under inactive hooks, against the baseline's
    files.
    """
    expected = f"PSNR above {NOISE_FLOOR:g} dB (equal images: inf)"
    gates = []
    for name, hooked in (
        ("baseline against itself", False),
        ("inactive merging against the baseline", True),
    ):
        handle = Merging(config).install(model).handle if hooked else None
        try:
            if handle is not None:
                handle.active = False
            made = [
                (job, image)
                for batch in batches
                for job, image in zip(batch, sample(model, settings, batch), strict=True)
            ]
        finally:
            if handle is not None:
                handle.remove()
        files = [load_image(baseline.items[job.name].path) for job, _ in made]
        again = [np.asarray(image) for _, image in made]
        lowest = min(
            psnr(to_float([a]), to_float([b])).item() for a, b in zip(files, again, strict=True)
        )
        got = f"{lowest:.4g} dB, lowest of {len(files)}"
        gates.append(Gate(name, expected, got, lowest > NOISE_FLOOR))
    return gates


def ceiling_gate(
    baseline: Run,
    metrics: Sequence[Metric],
    found: Sequence[Mapping[str, Value]],
    tools: Tools,
) -> Gate | None:
    """Each baseline image against that of the next prompt: every method must come nearer than that.

    Args:
        metrics: fidelity metrics of pairs to look at.
        found: values by metric name, one mapping a method.

    Returns:
        the gate; None where there are no two prompts.
    """
    pairs = unrelated_pairs(baseline)
    if not pairs or not metrics:
        return None
    values = pair_values(metrics, pairs, tools)
    prompts = {pair.key: pair.prompt_id for pair in pairs}
    ceiling = {metric: mean_interval(values[metric.name], prompts)["mean"] for metric in metrics}

    def nearer(metric: Metric, mean: float | None) -> bool:
        assert mean is not None
        return mean > ceiling[metric] if metric.better == "higher" else mean < ceiling[metric]

    passed = all(nearer(metric, value[metric.name].mean) for metric in metrics for value in found)
    got = ", ".join(f"{metric.label} {limit:.3g}" for metric, limit in ceiling.items())
    expected = "every method nearer to the baseline than the next prompt's image is"
    return Gate("unrelated pairing, the ceiling", expected, got, passed)


def unrelated_pairs(run: Run) -> list[Pair]:
    """Every image beside the next one that has another prompt (the last one beside the first)."""
    pairs, items = [], list(run.items.values())
    for number, item in enumerate(items):
        others = [*items[number + 1 :], *items[:number]]
        other = next((other for other in others if other.prompt != item.prompt), None)
        if other is not None:
            pairs.append(Pair(item.key, item.prompt_id, item.path, other.path))
    return pairs
