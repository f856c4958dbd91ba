"""Plot speed against closeness to the baseline: a point for each row.

The figure is drawn in placeholder colours, one for each CSS variable of the page, which are then
replaced by the variables. So one drawing fits the light and the dark scheme.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from ..results.schema import MethodResult, Results, Value
from .numbers import number
from .select import Focus

COLORS = {
    name: f"#{n:02x}{n:02x}{n:02x}"
    for n, name in enumerate(
        ("ink", "muted", "line", "paper", "baseline", "tomesd", "mame", "second", "third"), 1
    )
}
FAMILY_COLORS = {**COLORS, "rival": COLORS["second"]}
MARKERS = {"baseline": "D", "tomesd": "s", "mame": "o", "rival": "^"}
SIZE = 12  # of text, in the same units
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": SIZE,
    "text.parse_math": False,
    "text.color": COLORS["ink"],
    "axes.edgecolor": COLORS["line"],
    "axes.labelcolor": COLORS["muted"],
    "axes.labelsize": SIZE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": SIZE,
    "axes.titlelocation": "left",
    "xtick.color": COLORS["line"],
    "ytick.color": COLORS["line"],
    "xtick.labelcolor": COLORS["muted"],
    "ytick.labelcolor": COLORS["muted"],
    "xtick.labelsize": SIZE - 1,
    "ytick.labelsize": SIZE - 1,
    "grid.color": COLORS["line"],
    "grid.linewidth": 0.7,
}
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
        """Return (times as fast as the baseline, closeness)."""
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


def plot(results: Results, chosen: Focus) -> Markup | None:
    """Draw the figure as SVG; None if fewer than two rows have a speed and a closeness."""
    plotted = points(results, chosen)
    if len(plotted) < 2 or chosen.closeness is None:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72, layout="constrained")
        FigureCanvasAgg(figure)  # in which text can be measured
        axes = figure.subplots()
        _draw(axes, plotted)
        if chosen.closeness.better == "higher":
            axes.invert_yaxis()
        axes.set_xlabel("times as fast as the baseline  →  faster")
        axes.set_ylabel(f"closer  ←  {chosen.closeness.label}")
        figure.draw_without_rendering()
        _label(axes, plotted)
        words = [
            f"{p.row.label} {number(p.at[0], 2)} times as fast at"
            f" {number(p.at[1], chosen.closeness.digits)}"
            for p in plotted
        ]
        description = f"Speed against {chosen.closeness.label}: " + "; ".join(words)
        return _to_svg(figure, description)


def _draw(axes: Axes, plotted: Sequence[Point]) -> None:
    axes.grid(True)
    axes.set_axisbelow(True)
    axes.axvline(1, color=COLORS["muted"], linewidth=1, linestyle=(0, (2, 3)))
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


def _label(axes: Axes, plotted: Sequence[Point]) -> None:
    """Write each row's name at the first of `PLACES` that is free, if any.

    A place is free if the name covers no other name or point and lies within the plot.
    """
    inside = axes.get_window_extent()
    taken = [_around(axes, point) for point in plotted]
    for point in sorted(plotted, key=lambda p: not p.row.default):
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


def _to_svg(figure: Figure, description: str) -> Markup:
    """Return a figure as an inline <svg>, with a description for screen readers."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "plot"}):
        unnamed = {"Date": None, "Creator": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=unnamed)
    svg = buffer.getvalue()
    unwanted = r"^.*?(?=<svg)|<metadata>.*?</metadata>|<style[^>]*>.*?</style>"
    svg = re.sub(unwanted, "", svg, flags=re.S)
    # the same in every figure, and nothing refers to them
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    for variable, color in COLORS.items():
        svg = svg.replace(color, f"var(--{variable})")
    svg = re.sub(r" ?font-family: [^;\"]*;?", "", svg)  # the page's
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1))
