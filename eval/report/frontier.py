"""Plot speed against closeness to the baseline: a point per row, and the frontier.

The frontier has the points that no other point surpasses in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from ..results.schema import MethodResult, Results, Value
from .figures import COLORS, FAMILY_COLORS, MARKERS, SIZE, STYLE, new_figure, to_svg
from .numbers import number
from .select import Focus

WIDTH, HEIGHT = 760, 400  # units of the drawing, about pixels
# Places of a name next to its point: offset, and which part of the name is there.
PLACES = (
    (10, 0, "left", "center"),
    (-10, 0, "right", "center"),
    (8, 2, "left", "bottom"),
    (8, -2, "left", "top"),
    (-8, 2, "right", "bottom"),
    (-8, -2, "right", "top"),
    (0, 10, "center", "bottom"),
    (0, -10, "center", "top"),
    (-6, 9, "left", "bottom"),
    (6, 9, "right", "bottom"),
    (-6, -9, "left", "top"),
    (6, -9, "right", "top"),
)


@dataclass(frozen=True)
class Point:
    """A row with its speed, closeness and their intervals."""

    row: MethodResult
    speed: Value
    near: Value

    @property
    def at(self) -> tuple[float, float]:
        """(times as fast as the baseline, closeness)."""
        return self.speed.mean or 0.0, self.near.mean or 0.0


def points(results: Results, chosen: Focus) -> list[Point]:
    """Return the rows with a known speed and a finite closeness.

    The baseline has speed 1 and, for a distance, closeness 0. The floor is excluded, because it
    would make all others look alike.
    """
    plotted = []
    for row in results.measured:
        speed, near = row.value(chosen.speed), row.value(chosen.closeness)
        if row is chosen.baseline and chosen.closeness is not None:
            near = Value(mean=0.0) if chosen.closeness.better == "lower" else None
        if row.family == "floor" or speed is None or near is None:
            continue
        if near.mean is not None and math.isfinite(near.mean):
            plotted.append(Point(row, speed, near))
    return plotted


def frontier(plotted: Sequence[Point], lower: bool) -> list[Point]:
    """Return the points that no other surpasses in speed and closeness at once, slowest first.

    Args:
        plotted: the points.
        lower: True if lower closeness is better.
    """
    sign = 1 if lower else -1
    best = math.inf
    kept = []
    for point in sorted(plotted, key=lambda point: (-point.at[0], sign * point.at[1])):
        if sign * point.at[1] < best:
            best = sign * point.at[1]
            kept.append(point)
    return kept[::-1]


def plot(results: Results, chosen: Focus) -> Markup | None:
    """Draw the figure as SVG; None if fewer than two rows have a speed and a closeness."""
    plotted = points(results, chosen)
    if len(plotted) < 2 or chosen.closeness is None:
        return None
    lower = chosen.closeness.better == "lower"
    with matplotlib.rc_context(STYLE):
        figure = new_figure(WIDTH, HEIGHT)
        axes = figure.subplots()
        best = frontier(plotted, lower)
        _draw(axes, plotted, best)
        if not lower:
            axes.invert_yaxis()
        axes.set_xlabel("times as fast as the baseline  →  faster")
        axes.set_ylabel(f"closer  ←  {chosen.closeness.label}")
        figure.draw_without_rendering()
        _label(axes, plotted, best)
        words = [
            f"{p.row.label} {number(p.at[0], 2)} times as fast at"
            f" {number(p.at[1], chosen.closeness.digits)}"
            for p in plotted
        ]
        description = f"Speed against {chosen.closeness.label}: " + "; ".join(words)
        return to_svg(figure, "frontier", description)


def _draw(axes: Axes, plotted: Sequence[Point], best: Sequence[Point]) -> None:
    axes.grid(True)
    axes.set_axisbelow(True)
    axes.axvline(1, color=COLORS["muted"], linewidth=1, linestyle=(0, (2, 3)))
    band = zip(*(p.at for p in best), strict=True)
    axes.plot(*map(list, band), color=COLORS["muted"], linewidth=7, alpha=0.2)
    for point in plotted:
        color = FAMILY_COLORS[point.row.family]
        x, y = point.at
        for across in ((point.speed.interval, (y, y)), ((x, x), point.near.interval)):
            if None not in across:
                axes.plot(*across, color=color, linewidth=1.4, alpha=0.55, solid_capstyle="butt")
        axes.plot(
            x,
            y,
            MARKERS[point.row.family],
            color=color if point.row.family != "baseline" else COLORS["paper"],
            markeredgecolor=color,
            markersize=11 if point.row.default else 8,
            markeredgewidth=1.6,
            zorder=3,
        )
    axes.set_xlim(_limits([p.speed for p in plotted]))
    axes.set_ylim(_limits([p.near for p in plotted]))


def _limits(values: Sequence[Value]) -> tuple[float, float]:
    """Return limits that show every value with room for its name.

    Intervals widen them by at most half, and are cut off beyond.
    """
    means = [value.mean or 0.0 for value in values]
    low, high = min(means), max(means)
    room = (high - low) or abs(high) or 1.0
    ends = [end for value in values for end in value.interval or ()]
    return (
        max(min([low, *ends]), low - room / 2) - 0.12 * room,
        min(max([high, *ends]), high + room / 2) + 0.12 * room,
    )


def _label(axes: Axes, plotted: Sequence[Point], best: Sequence[Point]) -> None:
    """Write each row's name at the first of `PLACES` that is free, if any.

    A place is free if the name covers no other name or point and lies within the plot.
    """
    inside = axes.get_window_extent()
    taken = [_around(axes, point) for point in plotted]
    for point in sorted(plotted, key=lambda p: (not p.row.default, p not in best)):
        for dx, dy, across, along in PLACES:
            text = axes.annotate(
                point.row.label,
                point.at,
                (dx, dy),
                textcoords="offset points",
                ha=across,
                va=along,
                fontsize=SIZE,
                fontweight="bold" if point.row.default else "normal",
                color=COLORS["ink"],
            )
            box = text.get_window_extent()
            within = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0
            if within and not any(box.overlaps(one) for one in taken):
                taken.append(box)
                break
            text.remove()


def _around(axes: Axes, point: Point) -> Bbox:
    """Return what a point's marker covers, in units of the drawing."""
    return Bbox([axes.transData.transform(point.at)] * 2).padded(7)
