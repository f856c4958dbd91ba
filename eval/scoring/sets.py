"""Values of whole sets of images: distances to the baseline's or the reference's images, and
inception scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mame_sd.errors import UserError

from ..images import load_image
from ..metric_list import FEW_IMAGES, Metric, withheld_for_size
from ..metrics.frechet import Statistics, frechet_distance, statistics
from ..metrics.inception_score import inception_score
from .reference import Reference, check_reference
from .runs import Run
from .tools import Tools

SPLIT_FROM = 1000  # images from which on the inception score is taken over ten splits
_CHUNK = 64  # images decoded at once


def set_value(
    metric: Metric, run: Run, baseline: Run | None, reference: Reference | None, tools: Tools
) -> dict[str, Any]:
    """A set-wide metric of the run's images: mean, n, and what belongs to it.

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
    few = min(count, _count(metric, baseline, reference) or count)
    warning = (
        {"warning": f"N = {few}, below {FEW_IMAGES:,}: biased upward"} if few < FEW_IMAGES else {}
    )
    if tools.by_clean_fid(metric):
        mean = _clean_fid(metric, run, baseline, reference, tools)
        return {**value, "mean": mean, **warning}
    own = _run_features(metric, run, tools)
    other = None if metric.needs == "alone" else _other_side(metric, baseline, reference, tools)
    try:
        if other is None:
            return {**value, **_inception_score(own, 10 if count >= SPLIT_FROM else 1)}
        mean = frechet_distance(statistics(own["features"], _source(metric, tools)), other)
        return {**value, "mean": mean, **warning}
    except ValueError as error:
        raise UserError(
            f"{metric.name}: {error}; give another --reference, or leave it out"
        ) from None


def _other_side(
    metric: Metric, baseline: Run | None, reference: Reference | None, tools: Tools
) -> Tensor | Statistics:
    """Features or statistics of what the run is compared with."""
    if metric.needs == "sets":
        if baseline is None:
            raise ValueError(f"expected a baseline for {metric.name}, got none")
        return _run_features(metric, baseline, tools)["features"]
    check_reference([metric], reference)
    assert reference is not None
    if reference.statistics is not None:
        return reference.statistics
    load = reference.images(metric.name)
    return tools.remember(
        (metric.extractor, reference), lambda: _features(metric, load, reference.count, tools)
    )["features"]


def _clean_fid(
    metric: Metric, run: Run, baseline: Run | None, reference: Reference | None, tools: Tools
) -> float:
    """FID by the package clean-fid, which reads the files by itself."""

    def features(files: tuple[Path, ...]) -> Any:
        return tools.remember(("clean-fid", files), lambda: package.features(files))

    package = tools.network(metric)
    if metric.needs == "sets":
        if baseline is None:
            raise ValueError(f"expected a baseline for {metric.name}, got none")
        other = _files(baseline)
    else:
        check_reference([metric], reference)
        assert reference is not None
        other = reference.files
        if not other:
            raise UserError(
                f"--reference {reference.name}: expected images for --fid-backend clean-fid, got"
                " statistics; give a folder"
            )
    return float(package.distance(features(_files(run)), features(other)))


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
    """`features` [N, D] and `logits` [N, K] of images 0 to count - 1."""
    extractor = tools.network(metric)
    found: dict[str, list[Tensor]] = {"features": [], "logits": []}
    tools.on_progress(0, count)
    for start in range(0, count, _CHUNK):
        chunk = [load(index) for index in range(start, min(start + _CHUNK, count))]
        result = extractor(chunk)
        found["features"].append(result.features.cpu())
        found["logits"].append(result.logits.cpu())
        tools.on_progress(start + len(chunk), count)
    return {name: torch.cat(rows) for name, rows in found.items()}


def _inception_score(features: Mapping[str, Tensor], splits: int) -> dict[str, Any]:
    result = inception_score(features["logits"], splits=splits)
    spread = {"std": result.std} if result.splits > 1 else {}
    return {"mean": result.mean, **spread, "splits": result.splits, "cap": result.cap}


def _source(metric: Metric, tools: Tools) -> str:
    return str(tools.network(metric).name)
