"""Why a benchmark gives no value of a metric: what these images or this reference can't be measured
with.
"""

from __future__ import annotations

from typing import Any

from ..metric_list import LPIPS_NETS, Metric, withheld_for_size
from ..metrics.lpips import MIN_SIDE
from ..metrics.ssim import WINDOW
from .reference import Reference
from .runs import Run

MIN_SIDES = {"ssim": WINDOW, **dict.fromkeys(LPIPS_NETS, MIN_SIDE)}


def withheld(metric: Metric, run: Run, reference: Reference | None) -> str | None:
    """The reason that shows without the metric's network, or None."""
    reason = withheld_for_size(
        metric, len(run.items), None if reference is None else reference.count
    )
    if reason is not None:
        return reason
    if metric.needs == "set" and reference is None:
        return "no --reference to measure against"
    needed = MIN_SIDES.get(metric.name, 0)
    sizes = [
        (item.row.get("width", needed), item.row.get("height", needed))
        for item in run.items.values()
    ]
    width, height = min(sizes, key=min)
    return (
        f"images of {width} x {height}, needs {needed} x {needed}"
        if min(width, height) < needed
        else None
    )


def withheld_by(metric: Metric, network: Any, reference: Reference | None) -> str | None:
    """The reason why the reference's statistics can't be compared with features of `network`, an
    `Extractor`, or None.
    """
    statistics = None if reference is None else reference.statistics
    if metric.needs != "set" or statistics is None:
        return None
    if statistics.source and statistics.source != network.name:
        return f"the reference is features of {statistics.source}, needs {network.name}"
    if len(statistics.mean) != network.dims:
        return f"the reference has {len(statistics.mean)} dims, needs {network.dims}"
    return None
