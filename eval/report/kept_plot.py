"""Tokens kept per level and step: one panel for each row that merges, one line for each level."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes

from ..results.schema import Results, Row
from .figures import COLORS, NARROW, SIZE, STYLE, new_figure, to_svg
from .words import words_of

_COLORS = ("mame", "second", "third", "muted")
_PANELS_ACROSS = 3
_LETTER = 0.68  # width of a title's letter, of its size


def kept_by_level(row: Row) -> dict[int, tuple[float, dict[int, float]]]:
    """Level -> (tokens, {step: mean share kept}), levels with the most tokens first."""
    levels: dict[int, tuple[float, dict[int, list[float]]]] = {}
    for entry in row.kept:
        levels.setdefault(entry.level, (entry.tokens, {}))[1].setdefault(entry.step, []).append(
            entry.share
        )
    return {
        level: (tokens, {step: sum(shares) / len(shares) for step, shares in sorted(steps.items())})
        for level, (tokens, steps) in sorted(levels.items())
    }


def merging_levels(row: Row) -> dict[int, tuple[float, dict[int, float]]]:
    """`kept_by_level` without the levels at which nothing ever merged."""
    return {
        level: found for level, found in kept_by_level(row).items() if min(found[1].values()) < 1
    }


def plot(results: Results, width: int) -> Markup | None:
    """The figure as SVG, `width` units wide; None where no row has counted its tokens."""
    rows = [(row, merging_levels(row)) for row in results.measured]
    rows = [(row, levels) for row, levels in rows if levels]
    if not rows:
        return None
    across = 1 if width == NARROW else min(_PANELS_ACROSS, len(rows))
    down = -(-len(rows) // across)
    with matplotlib.rc_context(STYLE):
        figure = new_figure(width, (190 if across == 1 else 250) * down)
        panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flatten()
        letters = int(width / across / (_LETTER * SIZE))
        for axes, (row, levels) in zip(panels, rows, strict=False):
            _draw(axes, textwrap.fill(row.label, letters), levels)
        for axes in panels[len(rows) :]:
            axes.remove()
        for axes in figure.axes:
            if axes.get_subplotspec().is_last_row():  # type: ignore[union-attr]
                axes.set_xlabel(words_of(results).step)
        figure.axes[0].set_ylabel("tokens kept")
        lines = {str(line.get_label()): line for axes in figure.axes for line in axes.lines}
        figure.legend(
            lines.values(),
            lines.keys(),
            loc="outside upper left",
            ncols=4,
            frameon=False,
            handlelength=1.2,
        )
        description = f"Share of tokens kept per {words_of(results).step}. " + " ".join(
            describe(row.label, levels, results.kind) for row, levels in rows
        )
        return to_svg(figure, f"kept-{width}", description)


def describe(
    label: str, levels: Mapping[int, tuple[float, Mapping[int, float]]], kind: str = "generation"
) -> str:
    """One sentence: each level's range; of classification, whose blocks are of one level, the last
    share.
    """
    parts = []
    if kind == "classification":
        ((tokens, blocks),) = levels.values()
        return (
            f"{label} leaves {blocks[max(blocks)] * 100:.0f} % of {tokens:,.0f} after the last"
            " block."
        )
    for level, (tokens, steps) in levels.items():
        low, high = min(steps.values()), max(steps.values())
        share = (
            f"{low * 100:.0f}"
            if round(low, 2) == round(high, 2)
            else f"{low * 100:.0f} to {high * 100:.0f}"
        )
        parts.append(f"{share} % of {tokens:,.0f} at level {level}")
    return f"{label} keeps {', '.join(parts)}."


def _draw(axes: Axes, title: str, levels: Mapping[int, tuple[float, Mapping[int, float]]]) -> None:
    axes.grid(True, axis="y")
    axes.set_ylim(0, 1.04)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    axes.set_title(title, color=COLORS["ink"], fontsize=SIZE, fontweight="bold")
    for color, (tokens, steps) in zip(_COLORS, levels.values(), strict=False):
        x, y = [step + 1 for step in steps], list(steps.values())
        axes.plot(
            x,
            y,
            color=COLORS[color],
            linewidth=2,
            marker="o",
            markersize=3.5,
            label=f"{tokens:,.0f} tokens",
        )
