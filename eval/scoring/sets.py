"""Values of whole sets of images: distances to the baseline's or the reference's images, and
inception scores.

Images are shared over processes by ``index[rank::count]``. Their features are gathered in the order
of the run and computed with on the main process. So the number of processes changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mame_sd.errors import UserError

from ..images import load_image
from ..metric_list import FEW_IMAGES, Metric, withheld_for_size
from ..metrics.frechet import Statistics, frechet_distance, statistics
from ..metrics.inception_score import inception_score
from ..metrics.kid import kid, kid_exact
from .reference import Reference, check_reference
from .runs import Run
from .tools import Tools

SPLIT_FROM = 1000  # images from which on the inception score is taken over ten splits
_CHUNK = 64  # images decoded at once


def set_value(
    metric: Metric, run: Run, baseline: Run | None, reference: Reference | None, tools: Tools
) -> dict[str, Any]:
    """A set-wide metric of the run's images, on the main process only: mean, n, and what belongs to
    it.

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
    if tools.by_clean_fid(metric):
        return {**value, **_by_clean_fid(metric, run, baseline, reference, tools)}
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
        warning = (
            {"warning": f"N = {few}, below {FEW_IMAGES:,}: biased upward"}
            if few < FEW_IMAGES
            else {}
        )
        mean = frechet_distance(statistics(own["features"], _source(metric, tools)), other)
        return {**value, "mean": mean, **warning}
    except ValueError as error:
        raise UserError(
            f"{metric.name}: {error}; give another --reference, or leave it out"
        ) from None


def _other_side(
    metric: Metric, baseline: Run | None, reference: Reference | None, tools: Tools
) -> Tensor | Statistics:
    """Features or statistics of what the run is compared with; features on the main process
    only.
    """
    if metric.needs == "sets":
        if baseline is None:
            raise ValueError(f"expected a baseline for {metric.name}, got none")
        return _run_features(metric, baseline, tools)["features"]
    check_reference([metric], reference)
    assert reference is not None
    if reference.statistics is not None and not metric.name.startswith("kid"):
        return reference.statistics
    load = reference.images(metric.name)
    return tools.remember(
        (metric.extractor, reference), lambda: _features(metric, load, reference.count, tools)
    )["features"]


def _by_clean_fid(
    metric: Metric, run: Run, baseline: Run | None, reference: Reference | None, tools: Tools
) -> dict[str, Any]:
    """clean-fid's value, computed by the main process alone."""
    network = tools.network(metric)
    if metric.needs == "set":
        check_reference([metric], reference)
        assert reference is not None
        other, key = reference.files, reference.digest
        if not other:
            raise UserError(
                f"--reference {reference.name}: expected a folder of images for clean-fid, got"
                " another kind; give a folder"
            )
    else:
        assert baseline is not None
        other, key = _files(baseline), str(baseline.folder)
    if not tools.process.is_main:
        return {}
    own = tools.remember(("clean-fid", str(run.folder)), lambda: network.features(_files(run)))
    return {
        "mean": network.distance(
            metric.name, own, tools.remember(("clean-fid", key), lambda: network.features(other))
        )
    }


def _files(run: Run) -> tuple[Path, ...]:
    return tuple(item.path for item in run.items.values())


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


def _features(
    metric: Metric, load: Callable[[int], Any], count: int, tools: Tools
) -> dict[str, Tensor]:
    """`features` [N, D] and `logits` [N, K] of images 0 to count - 1; on other than the main
    process empty.
    """
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
    parts = tools.process.gather(
        {name: torch.cat(rows) if rows else None for name, rows in found.items()}
    )
    if not parts:
        return {"features": torch.empty(0), "logits": torch.empty(0)}
    return {name: interleave([part[name] for part in parts], count) for name in found}


def interleave(parts: Sequence[Tensor | None], count: int) -> Tensor:
    """Rows of the processes' parts, put back into the order that ``index[rank::count]`` took them
    from.
    """
    first = next(part for part in parts if part is not None)
    whole = first.new_empty((count, first.shape[1]))
    for rank, part in enumerate(parts):
        if part is not None:
            whole[rank :: len(parts)] = part
    return whole


def _inception_score(features: Mapping[str, Tensor], splits: int) -> dict[str, Any]:
    result = inception_score(features["logits"], splits=splits)
    spread = {"std": result.std} if result.splits > 1 else {}
    return {"mean": result.mean, **spread, "splits": result.splits, "cap": result.cap}


def _kernel_distance(metric: Metric, own: Tensor, other: Tensor) -> dict[str, Any]:
    """To the baseline's images, row by row of the same key: without the pairs.

    To others: over subsets.
    """
    if metric.needs == "sets":
        return {"mean": kid_exact(own, other, paired=True)}
    result = kid(own, other)
    return {
        "mean": result.mean,
        "std": result.std,
        "subsets": result.subsets,
        "subset_size": result.subset_size,
    }


def _source(metric: Metric, tools: Tools) -> str:
    return str(tools.network(metric).name)
