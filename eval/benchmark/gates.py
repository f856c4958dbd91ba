"""Check that a benchmark measures what it says, on its first images.

The baseline made again must equal the baseline, and merging's hooks, installed but inactive, must
change nothing; otherwise the difference is the noise floor. Two unrelated images give the ceiling:
a method that is as far from the baseline has kept nothing of it.

`sensitivity` judges whether an instrument (a model, its prompts and steps) can distinguish methods.
If every merged layer returns its mean over all tokens, attention carries no spatial information. An
instrument whose images hardly change then can't rank methods, because all of them lie between that
and the unmerged image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from mame_sd.config import MaMeConfig
from mame_sd.runs.jobs import GenerateSettings, Job
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.merging import Merging
from mame_sd.runs.sampling import sample

from ..images import load_image, to_float
from ..metric_list import Metric
from ..metrics.psnr import psnr
from ..results.schema import UNABLE, Gate, MethodResult, Value
from ..scoring.per_image import pair_values
from ..scoring.runs import Pair, Run
from ..scoring.tools import Tools
from ..stats import mean_interval

NOISE_FLOOR = 60.0  # dB: a few pixels off by one in 8 bits
LPIPS_FLOOR = 0.10  # of mean attention, at least
RIVAL_LPIPS = 0.01  # at least
INTERVAL_SHARE = 0.1  # of its LPIPS, which the width of the interval stays below
MORE = "take more (--num)"
MISSED = "MISSED"
QUESTION = "Can this model and these prompts distinguish methods?"


def repeat_gates(
    model: LoadedModel,
    settings: GenerateSettings,
    batches: Sequence[Sequence[Job]],
    baseline: Run,
    config: MaMeConfig,
) -> list[Gate]:
    """Make some batches again, plainly and under inactive hooks, and compare with the files.

    Args:
        model: the model.
        settings: settings of the baseline's images.
        batches: the batches.
        baseline: the baseline's run.
        config: what merges once the hooks are active.

    Returns:
        A gate for each of the two.
    """
    expected = f"PSNR above {NOISE_FLOOR:g} dB (equal images: inf)"
    gates = []
    for name, hooked in (
        ("baseline against itself", False),
        ("inactive merging against the baseline", True),
    ):
        with ExitStack() as stack:
            if hooked:
                handle = Merging(config).install(model).handle
                stack.callback(handle.remove)
                handle.active = False
            again = [np.asarray(one) for batch in batches for one in sample(model, settings, batch)]
        files = [load_image(baseline.items[job.name].path) for batch in batches for job in batch]
        pairs = zip(files, again, strict=True)
        lowest = min(psnr(to_float([a]), to_float([b])).item() for a, b in pairs)
        got = f"{lowest:.4g} dB, lowest of {len(files)}"
        gates.append(Gate(name, expected, got, lowest > NOISE_FLOOR))
    return gates


def ceiling_gate(
    baseline: Run,
    metrics: Sequence[Metric],
    by_method: Sequence[Mapping[str, Value]],
    tools: Tools,
) -> Gate | None:
    """Compare each baseline image with that of the next prompt; every method must be nearer.

    Args:
        baseline: the baseline's run.
        metrics: fidelity metrics of pairs.
        by_method: values by metric name, one mapping per method.
        tools: what computes metrics.

    Returns:
        The gate, or None if there are no two prompts.
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

    passed = all(
        nearer(metric, value[metric.name].mean) for metric in metrics for value in by_method
    )
    got = ", ".join(f"{metric.label} {limit:.3g}" for metric, limit in ceiling.items())
    expected = "every method nearer to the baseline than the next prompt's image"
    return Gate("distance to another prompt's image", expected, got, passed)


def unrelated_pairs(run: Run) -> list[Pair]:
    """Pair every image with the next one that has another prompt, and the last with the first."""
    pairs, items = [], list(run.items.values())
    for number, item in enumerate(items):
        others = [*items[number + 1 :], *items[:number]]
        other = next((other for other in others if other.prompt != item.prompt), None)
        if other is not None:
            pairs.append(Pair(item.key, item.prompt_id, item.path, other.path))
    return pairs


def sensitivity(rows: Sequence[MethodResult], floor: str, rival: str) -> str:
    """Say on one line whether the images can distinguish methods, and by which figures.

    Args:
        rows: rows with `lpips`, if measured.
        floor: name of mean attention.
        rival: name of the rival at 50 %.
    """
    lpips = {row.name: value for row in rows if (value := row.values.get("lpips", Value())).known}
    labels = {row.name: row.label for row in rows}
    if floor not in lpips:
        return f"{QUESTION} Not measured: no LPIPS of {floor}."
    parts, lacking = [], []
    few: list[bool] = []  # of each LPIPS that is too low: whether more prompts might raise it
    for name, least in ((floor, LPIPS_FLOOR), (rival, RIVAL_LPIPS)):
        if name not in lpips:
            lacking.append(f"{labels.get(name, name)} was not measured")
            continue
        mean, high = lpips[name].mean or 0.0, lpips[name].high
        parts.append(f"{labels[name]} has an LPIPS of {mean:.4f} (needs {least:.2f})")
        if mean < least:
            parts[-1] += f", {MISSED}"
            few.append(high is None or high >= least)
    wide = False
    if rival in lpips and lpips[rival].interval is None:
        lacking.append(f"{labels[rival]} has no interval")
    elif rival in lpips:
        low, high = lpips[rival].interval or (0.0, 0.0)
        mean = lpips[rival].mean or 0.0
        share = (high - low) / mean if mean else float("inf")
        wide = share >= INTERVAL_SHARE
        parts.append(f"the width of its 95 % interval is {share:.0%} (needs {INTERVAL_SHARE:.0%})")
        parts[-1] += f", {MISSED}" * wide
    if few:
        verdict = UNABLE + f" with so few prompts; {MORE}" * all(few)
    elif wide:
        verdict = f"Only large differences: too few prompts for small ones; {MORE}"
    else:
        verdict = "Yes, as far as measured" if lacking else "Yes"
    return f"{QUESTION} {verdict}. {'; '.join([*parts, *lacking])}."
