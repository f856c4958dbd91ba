"""Draw matplotlib figures as SVG elements that take colours and font from the page.

A figure is drawn in placeholder colours, one for each CSS variable of the page, which are then
replaced by the variables. So one drawing fits the light and the dark scheme.
"""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

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


def new_figure(width: int, height: int) -> Figure:
    """Return an empty figure of `width` x `height` units in which text can be measured."""
    figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def to_svg(figure: Figure, name: str, description: str) -> Markup:
    """Return a figure as an inline <svg>.

    Args:
        figure: the figure.
        name: keeps its ids apart from those of other figures.
        description: text for screen readers.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
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
