"""Choose what the report shows first: rows, metrics and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..results.schema import Column, MethodResult, Results

CASES = ("best", "median", "worst")
RIVALS = ("tomesd", "rival")  # families of the rows that the headline's is compared with


@dataclass(frozen=True)
class Focus:
    """The choices that headline, plot and pictures share. Those that the results lack are None.

    Attributes:
        baseline: the row of the baseline.
        mame: the row of the headline.
        rival: the nearest to the baseline of the rivals' rows.
        fastest: the fastest of the rivals' rows.
        speed: the metric of how many times as fast as the baseline a row is.
        latency: the cost metric beside `speed`: seconds, or CPU seconds.
        closeness: the fidelity metric that orders the images: LPIPS, or else the first measured
            one.
    """

    baseline: MethodResult | None
    mame: MethodResult | None
    rival: MethodResult | None
    fastest: MethodResult | None
    speed: Column | None
    latency: Column | None
    closeness: Column | None


def focus(results: Results) -> Focus:
    """Choose the headline's row, the nearest and fastest rivals, and the metrics.

    The row is our default, or else the first of ours.
    """
    rows = results.measured
    baseline = next((row for row in rows if row.family == "baseline"), None)
    ours = [row for row in rows if row.family == "mame"]
    mame = next((row for row in ours if row.default), ours[0] if ours else None)
    costs = {metric.name: metric for metric in results.block("cost")}
    speed = costs.get("speedup")
    on_cpu = baseline is not None and baseline.value(costs.get("cpu")) is not None
    latency, closeness = costs.get("cpu" if on_cpu else "latency"), _closeness(results)
    rivals = [row for row in rows if row.family in RIVALS]
    nearest = _best(rivals, closeness) or (rivals[0] if rivals else None)
    return Focus(baseline, mame, nearest, _best(rivals, speed), speed, latency, closeness)


def cases(results: Results, chosen: Focus) -> list[tuple[str, str]]:
    """Return (case, image key) of the best, median and worst image of the headline's row.

    They are ordered by closeness, and no image comes twice.
    """
    if chosen.mame is None:
        return []
    keys = {picture.key for picture in results.pictures}
    scores: Mapping[str, float] = (
        chosen.mame.per_image.get(chosen.closeness.name, {}) if chosen.closeness else {}
    )
    ranked = sorted((key for key in scores if key in keys), key=lambda key: (scores[key], key))
    if chosen.closeness is not None and chosen.closeness.better == "higher":
        ranked.reverse()
    if not ranked:
        return [("", picture.key) for picture in results.pictures[:3]]
    if len(ranked) == 1:
        return [("only", ranked[0])]
    picks = [(CASES[0], ranked[0]), (CASES[2], ranked[-1])]
    if len(ranked) > 2:
        picks.insert(1, (CASES[1], ranked[len(ranked) // 2]))
    return picks


def _closeness(results: Results) -> Column | None:
    fidelity = results.block("fidelity")
    ordered = sorted(fidelity, key=lambda metric: metric.name != "lpips")
    merged = [row for row in results.measured if row.family != "baseline"]
    return next((metric for metric in ordered if any(row.value(metric) for row in merged)), None)


def _best(rows: Sequence[MethodResult], metric: Column | None) -> MethodResult | None:
    """Return the row that is best by `metric`, or None if no row has a value."""
    if metric is None:
        return None
    sign = 1 if metric.better == "higher" else -1
    known = [(sign * (value.mean or 0.0), row) for row in rows if (value := row.value(metric))]
    return max(known, key=lambda pair: pair[0])[1] if known else None
