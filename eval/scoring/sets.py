"""Values of whole sets of images: distances to the baseline's or the reference's images, and
inception scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mame_sd.errors import UserError

from ..images import load_image
from ..metric_list import FEW_IMAGES, Metric, withheld_for_size
from ..metrics.frechet import frechet_distance, statistics
from ..metrics.inception_score import inception_score
from ..results.schema import Value
from .reference import Reference, check_reference
from .runs import Run
from .tools import Tools

SPLIT_FROM = 1000  # images from which on the inception score is taken over ten splits
_CHUNK = 64  # images decoded at once


def set_value(
    metric: Metric, run: Run, baseline: Run, reference: Reference | None, tools: Tools
) -> Value:
    """A set-wide metric of the run's images.

    Args:
        baseline: what "sets" compares with; reference: what "set" compares with.

    Raises:
        UserError: no reference where one is needed, or one that the metric can't use.
    """
    count = len(run.items)
    reason = withheld_for_size(metric, count, None if reference is None else reference.count)
    if reason is not None:
        return Value(n=count, withheld=reason)
    if metric.needs == "alone":
        logits = _run_features(metric, run, tools)["logits"]
        with _named(metric):
            score = inception_score(logits, splits=10 if count >= SPLIT_FROM else 1)
        std = score.std if score.splits > 1 else None
        return Value(mean=score.mean, n=count, std=std, splits=score.splits, cap=score.cap)
    if metric.needs == "set":
        check_reference([metric], reference)
    other = baseline if metric.needs == "sets" or reference is None else reference
    few = min(count, len(other.items) if isinstance(other, Run) else other.count or count)
    warning = f"N = {few}, below {FEW_IMAGES:,}: biased upward" if few < FEW_IMAGES else None
    with _named(metric):
        distance = _clean_fid if tools.by_clean_fid(metric) else _frechet
        return Value(mean=distance(metric, run, other, tools), n=count, warning=warning)


@contextmanager
def _named(metric: Metric) -> Iterator[None]:
    """What can't be computed is an error of the user's that names the metric."""
    try:
        yield
    except ValueError as error:
        raise UserError(
            f"{metric.name}: {error}; give another --reference, or leave it out"
        ) from None


def _frechet(metric: Metric, run: Run, other: Run | Reference, tools: Tools) -> float:
    """FID by our own code, of the features of images or the statistics of a reference."""
    own = statistics(_run_features(metric, run, tools)["features"], tools.network(metric).name)
    if isinstance(other, Run):
        return frechet_distance(own, _run_features(metric, other, tools)["features"])
    if other.load is None:
        assert other.statistics is not None
        return frechet_distance(own, other.statistics)
    load = other.load
    found = tools.remember(
        (metric.extractor, other), lambda: _features(metric, load, other.count, tools)
    )
    return frechet_distance(own, found["features"])


def _clean_fid(metric: Metric, run: Run, other: Run | Reference, tools: Tools) -> float:
    """FID by the package clean-fid, which reads the files by itself."""
    package = tools.network(metric)
    files = _files(other) if isinstance(other, Run) else other.files
    if not files:
        assert isinstance(other, Reference)
        raise UserError(
            f"--reference {other.name}: expected images for --fid-backend clean-fid, got"
            " statistics; give a folder"
        )

    def features(some: tuple[Path, ...]) -> Any:
        return tools.remember(("clean-fid", some), lambda: package.features(some))

    return float(package.distance(features(_files(run)), features(files)))


def _files(run: Run) -> tuple[Path, ...]:
    return tuple(item.path for item in run.items.values())


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
