"""Say why a metric is withheld: which images or references it can't be computed for."""

from __future__ import annotations

from typing import Any

from ..metric_list import MIN_IMAGES, Metric
from ..metrics.lpips import MIN_SIDE
from ..metrics.ssim import WINDOW
from .reference import Reference
from .runs import Run

MIN_SIDES = {"ssim": WINDOW, "lpips": MIN_SIDE}


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
