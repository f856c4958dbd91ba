"""Compute metrics of sets of images, and say which metrics are withheld, and why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from mame_sd.errors import UserError

from ..images import load_image
from ..metric_list import FEW_IMAGES, MIN_IMAGES, Metric
from ..metrics.frechet import frechet_distance
from ..metrics.inception_score import inception_score
from ..metrics.kernel import kernel_distance
from ..metrics.lpips import MIN_SIDE
from ..metrics.ssim import WINDOW
from ..networks.extractors import Features
from ..results.schema import Value
from .reference import Reference, check_reference
from .runs import Run
from .tools import Tools

SPLIT_FROM = 1000  # smallest number of images for an inception score over ten splits
_CHUNK = 64  # images decoded at once
MIN_SIDES = {"ssim": WINDOW, "lpips": MIN_SIDE}


def set_value(metric: Metric, run: Run, reference: Reference | None, tools: Tools) -> Value:
    """Compute a metric of all images of a run.

    Args:
        metric: the metric.
        run: the run.
        reference: what metrics that need "set" compare with, or None.
        tools: what computes them.

    Raises:
        UserError: the reference is missing.
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
    check_reference([metric], reference)
    assert reference is not None
    few = min(count, len(reference.files))
    with _named(metric):
        distance = _distance(metric, run.files, reference.files, tools)
    biased = few < FEW_IMAGES and not metric.name.startswith("kid")
    warning = f"N = {few}, below {FEW_IMAGES:,}: biased upward" if biased else None
    return Value(mean=distance, n=count, warning=warning)


@contextmanager
def _named(metric: Metric) -> Iterator[None]:
    """Turn a ValueError of the block into a UserError that names the metric."""
    try:
        yield
    except ValueError as error:
        raise UserError(
            f"{metric.name}: {error}; give another --reference, or leave it out"
        ) from None


def _distance(
    metric: Metric, files: tuple[Path, ...], others: tuple[Path, ...], tools: Tools
) -> float:
    """Compute the distance of images from others."""
    if tools.by_clean_fid(metric):  # which reads the files itself
        network = tools.network(metric)
        both = (
            tools.remember(("clean-fid", of), partial(network.features, of))
            for of in (files, others)
        )
        return float(network.distance(*both))
    own, theirs = (_features(metric, of, tools).features for of in (files, others))
    if not metric.name.startswith("kid"):
        return frechet_distance(own, theirs)
    scale = 1000 if metric.name == "kid" else 1  # as published: Inception's is tiny
    return scale * kernel_distance(own, theirs)


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
    """Return why a metric of sets is withheld for so few images, or None."""
    if metric.needs not in ("set", "alone"):
        return None
    if len(run.items) < MIN_IMAGES:
        return f"N = {len(run.items)}, needs {MIN_IMAGES}"
    if metric.needs == "alone" or reference is None or len(reference.files) >= MIN_IMAGES:
        return None
    return f"reference of {len(reference.files)}, needs {MIN_IMAGES}"


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
