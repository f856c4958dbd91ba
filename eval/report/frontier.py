"""Speed against closeness to the baseline: one point for each row, and the frontier of those that
none surpasses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from ..results.schema import Results, Row, Value
from .figures import COLORS, FAMILY_COLORS, MARKERS, SIZE, STYLE, WIDE, new_figure, to_svg
from .numbers import number, times
from .select import Focus


@dataclass(frozen=True)
class Point:
    """A row at (times as fast as the baseline, closeness), with its intervals (low, high) where it
    has them.
    """

    row: Row
    speed: float
    closeness: float
    speed_interval: tuple[float, float] | None = None
    closeness_interval: tuple[float, float] | None = None


def points(results: Results, chosen: Focus) -> list[Point]:
    """The rows with a known speed and a finite closeness.

    The baseline is at speed 1 and, for a distance, closeness 0.

    Not the floor, beside which all others would look alike.
    """
    found = []
    for row in results.measured:
        if row.family == "floor":
            continue
        speed, value = chosen.speedup(row), row.value(chosen.closeness)
        if (
            row is chosen.baseline
            and chosen.closeness is not None
            and chosen.closeness.better == "lower"
        ):
            value = Value(mean=0.0)
        if speed is None or value is None or value.mean is None or not math.isfinite(value.mean):
            continue
        latency = row.value(chosen.latency) if row is not chosen.baseline else None
        found.append(
            Point(row, speed, value.mean, speed_interval(latency, speed, chosen), _pair(value))
        )
    return found


def frontier(found: Sequence[Point], lower: bool) -> list[Point]:
    """Those that no other point surpasses in speed and closeness at once, slowest first; `lower`
    closeness is better.
    """
    sign = 1 if lower else -1
    ordered = sorted(found, key=lambda point: (-point.speed, sign * point.closeness))
    best = math.inf
    kept = []
    for point in ordered:
        if sign * point.closeness < best:
            best = sign * point.closeness
            kept.append(point)
    return kept[::-1]


def plot(results: Results, chosen: Focus, width: int) -> Markup | None:
    """The figure as SVG, `width` units wide; None where fewer than two rows have both figures."""
    found = points(results, chosen)
    if len(found) < 2 or chosen.closeness is None:
        return None
    lower = chosen.closeness.better == "lower"
    with matplotlib.rc_context(STYLE):
        figure = new_figure(width, 400 if width == WIDE else 330)
        axes = figure.subplots()
        best = frontier(found, lower)
        _draw(axes, found, best)
        if not lower:
            axes.invert_yaxis()
        axes.set_xlabel("times as fast as the baseline  →  faster")
        axes.set_ylabel(f"closer  ←  {chosen.closeness.label}")
        figure.draw_without_rendering()
        _label(axes, found, best)
        words = [
            f"{p.row.label} {times(p.speed)} times as fast at"
            f" {number(p.closeness, chosen.closeness.digits)}"
            for p in found
        ]
        description = f"Speed against {chosen.closeness.label}: " + "; ".join(words)
        return to_svg(figure, f"frontier-{width}", description)


def _draw(axes: Axes, found: Sequence[Point], best: Sequence[Point]) -> None:
    axes.grid(True)
    axes.set_axisbelow(True)
    axes.axvline(1, color=COLORS["muted"], linewidth=1, linestyle=(0, (2, 3)))
    axes.plot(
        [p.speed for p in best],
        [p.closeness for p in best],
        color=COLORS["muted"],
        linewidth=7,
        alpha=0.2,
    )
    for point in found:
        color = FAMILY_COLORS[point.row.family]
        for pair, where in ((point.speed_interval, "x"), (point.closeness_interval, "y")):
            if pair is not None:
                across = (
                    ([point.speed] * 2, pair) if where == "y" else (pair, [point.closeness] * 2)
                )
                axes.plot(*across, color=color, linewidth=1.4, alpha=0.55, solid_capstyle="butt")
        axes.plot(
            point.speed,
            point.closeness,
            MARKERS[point.row.family],
            color=color if point.row.family != "baseline" else COLORS["paper"],
            markeredgecolor=color,
            markersize=11 if point.row.default else 8,
            markeredgewidth=1.6,
            zorder=3,
        )
    _limit(axes, [p.speed for p in found], [p.speed_interval for p in found], "x")
    _limit(axes, [p.closeness for p in found], [p.closeness_interval for p in found], "y")


def _limit(
    axes: Axes, values: Sequence[float], intervals: Sequence[tuple[float, float] | None], axis: str
) -> None:
    """Show every value with room for its name; intervals may widen that by half, and run out of the
    frame beyond.
    """
    low, high = min(values), max(values)
    room = (high - low) or abs(high) or 1.0
    ends = [end for pair in intervals if pair is not None for end in pair]
    low = max(min([low, *ends]), low - room / 2) - 0.12 * room
    high = min(max([high, *ends]), high + room / 2) + 0.12 * room
    axes.set(**{f"{axis}lim": (low, high)})


def _label(axes: Axes, found: Sequence[Point], best: Sequence[Point]) -> None:
    """Each row's name right of its point, or left of it in the right half; none where it would
    cover another name or a point.
    """
    inside = axes.get_window_extent()
    taken = [_around(axes, point) for point in found]
    for point in sorted(found, key=lambda p: (not p.row.default, p not in best)):
        own = _around(axes, point)
        right = own.x0 > inside.x0 + inside.width / 2
        text = axes.annotate(
            point.row.label,
            (point.speed, point.closeness),
            (-10 if right else 10, 0),
            textcoords="offset points",
            ha="right" if right else "left",
            va="center",
            fontsize=SIZE,
            fontweight="bold" if point.row.default else "normal",
            color=COLORS["ink"],
        )
        box = text.get_window_extent()
        if not point.row.default and any(box.overlaps(one) for one in taken):
            text.remove()
        else:
            taken.append(box)


def _around(axes: Axes, point: Point) -> Bbox:
    """What the point's marker covers, in units of the drawing."""
    x, y = axes.transData.transform((point.speed, point.closeness))
    return Bbox.from_bounds(x - 7, y - 7, 14, 14)


def _pair(value: Value) -> tuple[float, float] | None:
    return None if value.low is None or value.high is None else (value.low, value.high)


def speed_interval(
    latency: Value | None, speed: float, chosen: Focus
) -> tuple[float, float] | None:
    """The interval of the metric of speed as times the baseline's, which is taken as exact."""
    if latency is None or not latency.mean or not latency.low or not latency.high:
        return None
    if chosen.latency is not None and chosen.latency.better == "higher":
        return speed * latency.low / latency.mean, speed * latency.high / latency.mean
    base = speed * latency.mean
    return base / latency.high, base / latency.low
