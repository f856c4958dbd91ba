"""Scores of runs: per-image values by key, set-wide values with their sample-size rules, and ``score`` of two runs.

Images are shared over processes by ``index[rank::count]``; what they found is gathered in the order of the run and
computed with on the main process, so the number of processes changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mame_sd.errors import UserError
from mame_sd.runs.records import Sample

from ..images import load_image, to_float
from ..metric_list import FEW_IMAGES, Metric, withheld_for_size
from ..metrics.frechet import Statistics, frechet_distance, statistics
from ..metrics.inception_score import inception_score
from ..metrics.kid import kid, kid_exact
from ..metrics.psnr import psnr
from ..metrics.ssim import ms_ssim, ssim
from ..stats import mean_interval, paired_difference
from .reference import Reference, check_foreign
from .retrieval import background_right, retrieved
from .runs import Pair, Run
from .tools import Tools, network_name

SPLIT_FROM = 1000  # images from which on the inception score is taken over ten splits
_CHUNK = 64  # images decoded at once

Values = dict[str, float]
PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"psnr": psnr, "ssim": ssim, "ms_ssim": ms_ssim}
TRUTH = {"retrieval": retrieved, "background": background_right}


def pair_values(metrics: Sequence[Metric], pairs: Sequence[Pair], tools: Tools) -> dict[str, Values]:
    """Each of `metrics` (needs "pair") for each pair, by metric and key; all of them on the main process only.

    Raises:
        UserError: a broken image, sizes that differ within a pair or are too small for a metric; the file is named.
    """
    functions = {metric.name: _pairwise(metric, tools) for metric in metrics}
    mine = pairs[tools.process.rank :: tools.process.count]
    found: dict[str, Values] = {name: {} for name in functions}
    tools.on_progress(0, len(mine))
    for number, pair in enumerate(mine, 1):
        a, b = load_image(pair.a), load_image(pair.b)
        if a.shape != b.shape:
            sizes = [f"{image.shape[1]} x {image.shape[0]}" for image in (a, b)]
            raise UserError(
                f"{pair.b}: expected the size of {pair.a}, {sizes[0]}, got {sizes[1]}; compare runs of one size"
            )
        one, other = (to_float([image]).to(tools.device) for image in (a, b))
        for name, function in functions.items():
            try:
                found[name][pair.key] = function(one, other).item()
            except ValueError as error:
                raise UserError(f"{name} of {pair.b}: {error}; leave it out, or use other images") from None
        tools.on_progress(number, len(mine))
    return _in_order(found, [pair.key for pair in pairs], tools)


def image_values(metric: Metric, run: Run, tools: Tools) -> Values:
    """`metric` (needs "image") for each image of the run, by key; all of them on the main process only."""
    items = list(run.items.values())
    function = _imagewise(metric, tools)
    mine = items[tools.process.rank :: tools.process.count]
    found: Values = {}
    tools.on_progress(0, len(mine))
    for number, item in enumerate(mine, 1):
        found[item.key] = function(item)
        tools.on_progress(number, len(mine))
    return _in_order({metric.name: found}, [item.key for item in items], tools)[metric.name]


def set_value(
    metric: Metric, run: Run, baseline: Run | None, reference: Reference | None, tools: Tools
) -> dict[str, Any]:
    """A set-wide metric of the run's images, on the main process only: mean, n, and what belongs to it.

    Args:
        baseline: what "sets" compares with; reference: what "set" compares with.

    Raises:
        UserError: no reference where one is needed, or one that the metric can't use.
    """
    count = len(run.items)
    value: dict[str, Any] = {"mean": None, "low": None, "high": None, "n": count}
    reason = withheld_for_size(metric, count, None if reference is None else reference.count)
    if reason is not None:
        return {**value, "withheld": reason}
    own = _run_features(metric, run, tools)
    other = None if metric.needs == "alone" else _other_side(metric, baseline, reference, tools)
    if not tools.process.is_main:
        return value
    try:
        if other is None:
            return {**value, **_inception_score(own, 10 if count >= SPLIT_FROM else 1)}
        if isinstance(other, Tensor) and metric.needs == "sets" and baseline is not None:
            rows = {key: number for number, key in enumerate(baseline.items)}
            other = other[[rows[key] for key in run.items]]
        if metric.name.startswith("kid") and isinstance(other, Tensor):
            return {**value, **_kernel_distance(metric, own["features"], other)}
        few = min(count, _count(metric, baseline, reference) or count)
        warning = {"warning": f"N = {few}, below {FEW_IMAGES:,}: biased upward"} if few < FEW_IMAGES else {}
        mean = frechet_distance(statistics(own["features"], _source(metric, tools)), other)
        return {**value, "mean": mean, **warning}
    except ValueError as error:
        raise UserError(f"{metric.name}: {error}; give another --reference, or leave it out") from None


def score(
    a: Run, b: Run, pairs: Sequence[Pair], reference: Reference | None, metrics: Sequence[Metric], tools: Tools
) -> dict[str, Any]:
    """Every one of `metrics` of run `b`, its fidelity measured against run `a`; by name, on the main process only.

    Each value has mean, low, high and n; a quality metric with values per image has also "difference", from `a`.

    Raises:
        UserError: whatever the metrics raise; nothing is left out in silence.
    """
    check_reference(metrics, reference)
    check_foreign(reference, a, b)
    for metric in metrics:
        if withheld_for_size(metric, len(b.items), None if reference is None else reference.count) is None:
            tools.network(metric)  # missing weights are found before anything is computed
    prompts = {item.key: item.prompt_id for item in a.items.values()}
    paired = pair_values([metric for metric in metrics if metric.needs == "pair"], pairs, tools)
    found: dict[str, Any] = {}
    for metric in metrics:
        if metric.needs == "pair":
            found[metric.name] = (
                mean_value(metric, paired[metric.name], prompts, tools) if tools.process.is_main else {}
            )
        elif metric.needs == "image":
            own, before = (image_values(metric, run, tools) for run in (b, a))
            if tools.process.is_main:
                value = mean_value(metric, own, prompts, tools)
                found[metric.name] = {**value, "difference": paired_difference(own, before, prompts)}
        else:
            found[metric.name] = set_value(metric, b, a, reference, tools)
    return found


def mean_value(metric: Metric, values: Values, prompts: Mapping[str, str], tools: Tools) -> dict[str, Any]:
    """The mean of per-image values with its interval (`mean_interval`); its note says which CLIP it is of.

    Raises UserError for NaN, which only broken weights give.
    """
    try:
        found = mean_interval(values, prompts)
    except ValueError as error:
        raise UserError(f"{metric.name}: {error}; check the weights with mame-sd-eval weights") from None
    if network_name(metric) == "clip":
        found["note"] = "; ".join(filter(None, (tools.network(metric).name, found.get("note"))))
    return found


def cut_prompts(metrics: Sequence[Metric], run: Run, tools: Tools) -> tuple[int, int]:
    """How many of the run's prompts, each counted once, the CLIP score read only in part, and how many there are."""
    prompts = sorted({item.prompt for item in run.items.values()})
    clip = tools.networks.get("clip")
    asked = any(metric.name == "clip_score" for metric in metrics)
    if not asked or clip is None or isinstance(clip, Exception):
        return 0, len(prompts)
    return len(clip.cut(prompts)), len(prompts)


def check_reference(metrics: Sequence[Metric], reference: Reference | None) -> None:
    """Raise UserError when one of `metrics` needs a reference and there is none."""
    needing = [metric.name for metric in metrics if metric.needs == "set"]
    if needing and reference is None:
        raise UserError(
            f"--metrics {','.join(needing)}: expected a --reference to measure quality against, got none; give a folder "
            "of images or an .npz of statistics, or ask for fid_to_baseline"
        )


def _pairwise(metric: Metric, tools: Tools) -> Callable[[Tensor, Tensor], Tensor]:
    if metric.name in PAIRWISE:
        return PAIRWISE[metric.name]
    network = tools.network(metric)
    if metric.name == "clip_image":
        from ..metrics.clip import clip_image_cosine

        return lambda a, b: clip_image_cosine(network, a, b)
    found: Callable[[Tensor, Tensor], Tensor] = network
    return found


def _imagewise(metric: Metric, tools: Tools) -> Callable[[Sample], float]:
    if metric.name in TRUTH:
        return lambda item: TRUTH[metric.name](load_image(item.path), item.prompt)
    from ..metrics.clip import clip_score

    network = tools.network(metric)

    def of_clip(item: Sample) -> float:
        images = to_float([load_image(item.path)]).to(tools.device)
        return float(clip_score(network, images, [item.prompt]).scores.item())

    return of_clip


def _other_side(metric: Metric, baseline: Run | None, reference: Reference | None, tools: Tools) -> Tensor | Statistics:
    """Features or statistics of what the run is compared with; features on the main process only."""
    if metric.needs == "sets":
        if baseline is None:
            raise ValueError(f"expected a baseline for {metric.name}, got none")
        return _run_features(metric, baseline, tools)["features"]
    check_reference([metric], reference)
    assert reference is not None
    if reference.statistics is not None and not metric.name.startswith("kid"):
        return reference.statistics
    load = reference.images(metric.name)
    return tools.remember((metric.extractor, reference), lambda: _features(metric, load, reference.count, tools))[
        "features"
    ]


def _count(metric: Metric, baseline: Run | None, reference: Reference | None) -> int:
    """Images of what the run is compared with; 0 where that is not known."""
    if metric.needs == "sets":
        return 0 if baseline is None else len(baseline.items)
    return 0 if reference is None else reference.count


def _run_features(metric: Metric, run: Run, tools: Tools) -> dict[str, Tensor]:
    items = list(run.items.values())
    return tools.remember(
        (metric.extractor, run.folder),
        lambda: _features(metric, lambda index: load_image(items[index].path), len(items), tools),
    )


def _features(metric: Metric, load: Callable[[int], Any], count: int, tools: Tools) -> dict[str, Tensor]:
    """`features` [N, D] and `logits` [N, K] of images 0 to count - 1; on other than the main process empty."""
    extractor = tools.network(metric)
    mine = range(count)[tools.process.rank :: tools.process.count]
    found: dict[str, list[Tensor]] = {"features": [], "logits": []}
    tools.on_progress(0, len(mine))
    for start in range(0, len(mine), _CHUNK):
        chunk = [load(index) for index in mine[start : start + _CHUNK]]
        result = extractor(chunk)
        found["features"].append(result.features.cpu())
        found["logits"].append(result.logits.cpu())
        tools.on_progress(start + len(chunk), len(mine))
    parts = tools.process.gather({name: torch.cat(rows) if rows else None for name, rows in found.items()})
    if not parts:
        return {"features": torch.empty(0), "logits": torch.empty(0)}
    return {name: _interleave([part[name] for part in parts], count) for name in found}


def _interleave(parts: Sequence[Tensor | None], count: int) -> Tensor:
    """Rows of the processes' parts, put back into the order that ``index[rank::count]`` took them from."""
    first = next(part for part in parts if part is not None)
    whole = first.new_empty((count, first.shape[1]))
    for rank, part in enumerate(parts):
        if part is not None:
            whole[rank :: len(parts)] = part
    return whole


def _in_order(found: Mapping[str, Values], keys: Sequence[str], tools: Tools) -> dict[str, Values]:
    """Values of all processes, by name and in the order of `keys`; on other than the main process empty."""
    parts = tools.process.gather(dict(found))
    if not parts:
        return {name: {} for name in found}
    merged = {name: {key: value for part in parts for key, value in part[name].items()} for name in found}
    return {name: {key: values[key] for key in keys} for name, values in merged.items()}


def _inception_score(features: Mapping[str, Tensor], splits: int) -> dict[str, Any]:
    result = inception_score(features["logits"], splits=splits)
    spread = {"std": result.std} if result.splits > 1 else {}
    return {"mean": result.mean, **spread, "splits": result.splits, "cap": result.cap}


def _kernel_distance(metric: Metric, own: Tensor, other: Tensor) -> dict[str, Any]:
    """To the baseline's images, row by row of the same key: without the pairs. To others: over subsets."""
    if metric.needs == "sets":
        return {"mean": kid_exact(own, other, paired=True)}
    result = kid(own, other)
    return {"mean": result.mean, "std": result.std, "subsets": result.subsets, "subset_size": result.subset_size}


def _source(metric: Metric, tools: Tools) -> str:
    return str(tools.network(metric).name)
