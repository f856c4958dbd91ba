"""Compute metrics of sets of images, and say which metrics are withheld, and why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mame_sd.errors import UserError

from ..images import load_image
from ..metric_list import FEW_IMAGES, MIN_IMAGES, Metric
from ..metrics.frechet import frechet_distance, statistics
from ..metrics.inception_score import inception_score
from ..metrics.kernel import kernel_distance
from ..metrics.lpips import MIN_SIDE
from ..metrics.ssim import WINDOW
from ..networks.extractors import Features
from ..results.schema import Value
from .reference import Reference, check_reference
from .runs import Run
from .tools import Tools

SPLIT_FROM = 1000  # images from which on the inception score is taken over ten splits
_CHUNK = 64  # images decoded at once
MIN_SIDES = {"ssim": WINDOW, "lpips": MIN_SIDE}


def set_value(
    metric: Metric, run: Run, baseline: Run, reference: Reference | None, tools: Tools
) -> Value:
    """Compute a metric of all images of a run.

    Args:
        metric: the metric.
        run: the run.
        baseline: what metrics that need "sets" compare with.
        reference: what metrics that need "set" compare with, or None.
        tools: what computes them.

    Raises:
        UserError: a reference is missing, or the metric can't use it.
    """
    count = len(run.items)
    reason = too_few(metric, run, reference)
    if reason is not None:
        return Value(n=count, withheld=reason)
    if metric.needs == "alone":
        logits = _features(metric, run.files, tools).logits
        splits = 10 if count >= SPLIT_FROM else 1
        with _named(metric):
            mean, std = inception_score(logits, splits)
        spread = std if splits > 1 else None
        return Value(mean=mean, n=count, std=spread, splits=splits, cap=count / splits)
    if metric.needs == "set":
        check_reference([metric], reference)
    other = baseline if metric.needs == "sets" or reference is None else reference
    few = min(count, len(other.items) if isinstance(other, Run) else other.count or count)
    with _named(metric):
        if metric.name.startswith("kid"):  # which has no bias
            scale = 1000 if metric.name == "kid" else 1  # as published: Inception's is tiny
            return Value(mean=scale * _kernel(metric, run, other, tools), n=count)
        warning = f"N = {few}, below {FEW_IMAGES:,}: biased upward" if few < FEW_IMAGES else None
        distance = _clean_fid if tools.by_clean_fid(metric) else _frechet
        return Value(mean=distance(metric, run, other, tools), n=count, warning=warning)


@contextmanager
def _named(metric: Metric) -> Iterator[None]:
    """Turn a ValueError of the block into a UserError that names the metric."""
    try:
        yield
    except ValueError as error:
        raise UserError(
            f"{metric.name}: {error}; give another --reference, or leave it out"
        ) from None


def _kernel(metric: Metric, run: Run, other: Run | Reference, tools: Tools) -> float:
    """Compute the KID of images' features."""
    if isinstance(other, Reference) and other.statistics is not None:
        raise UserError(
            f"--reference {other.name}: expected images for {metric.name}, got statistics; give a"
            " folder, or leave the metric out"
        )
    own, others = (_features(metric, of.files, tools).features for of in (run, other))
    return kernel_distance(own, others)


def _frechet(metric: Metric, run: Run, other: Run | Reference, tools: Tools) -> float:
    """Compute the Frechet distance of images' features, or to statistics of a reference."""
    own = statistics(_features(metric, run.files, tools).features, tools.network(metric).name)
    if isinstance(other, Reference) and other.statistics is not None:
        return frechet_distance(own, other.statistics)
    return frechet_distance(own, _features(metric, other.files, tools).features)


def _clean_fid(metric: Metric, run: Run, other: Run | Reference, tools: Tools) -> float:
    """Compute FID by the package clean-fid, which reads the files itself."""
    package = tools.network(metric)
    if isinstance(other, Reference) and not other.files:
        raise UserError(
            f"--reference {other.name}: expected images for --fid-backend clean-fid, got"
            " statistics; give a folder"
        )

    def features(of: Run | Reference) -> Any:
        return tools.remember(("clean-fid", of.files), lambda: package.features(of.files))

    return float(package.distance(features(run), features(other)))


def _features(metric: Metric, files: tuple[Path, ...], tools: Tools) -> Features:
    """Compute features and logits of image files, in order."""

    def made() -> Features:
        extractor, chunks = tools.network(metric), []
        tools.on_progress(0, len(files))
        for start in range(0, len(files), _CHUNK):
            chunk = [load_image(file) for file in files[start : start + _CHUNK]]
            chunks.append(extractor(chunk))
            tools.on_progress(start + len(chunk), len(files))
        features, logits = ([getattr(f, name) for f in chunks] for name in ("features", "logits"))
        return Features(torch.cat(features), torch.cat(logits))

    return tools.remember((metric.network, files), made)


def too_few(metric: Metric, run: Run, reference: Reference | None) -> str | None:
    """Return why a metric of sets is withheld for so few images, or None.

    A reference whose number of images is unknown (0) is accepted.
    """
    if metric.needs not in ("set", "sets", "alone"):
        return None
    if len(run.items) < MIN_IMAGES:
        return f"N = {len(run.items)}, needs {MIN_IMAGES}"
    others = reference.count if reference is not None and metric.needs == "set" else 0
    return f"reference of {others}, needs {MIN_IMAGES}" if 0 < others < MIN_IMAGES else None


def withheld(metric: Metric, run: Run, reference: Reference | None) -> str | None:
    """Return why a metric is withheld, as far as that doesn't depend on its network, or None."""
    reason = too_few(metric, run, reference)
    if reason is not None:
        return reason
    if metric.needs == "set" and reference is None:
        return "no --reference to measure against"
    needed = MIN_SIDES.get(metric.name, 0)
    rows = [item.row for item in run.items.values()]
    sizes = ((row.get("width", needed), row.get("height", needed)) for row in rows)
    width, height = min(sizes, key=min)
    if min(width, height) >= needed:
        return None
    return f"images of {width} x {height}, needs {needed} x {needed}"


def withheld_by(metric: Metric, network: Any, reference: Reference | None) -> str | None:
    """Return why the reference's statistics can't be compared with features of a network, or None.

    `network` is an `Extractor`.
    """
    statistics = None if reference is None else reference.statistics
    if metric.needs != "set" or statistics is None:
        return None
    if statistics.source and statistics.source != network.name:
        return f"the reference is features of {statistics.source}, needs {network.name}"
    if len(statistics.mean) != network.dims:
        return f"the reference has {len(statistics.mean)} dims, needs {network.dims}"
    return None
