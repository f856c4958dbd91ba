"""Measured settings as text: a table, and a plot of LPIPS over speed."""

from __future__ import annotations

from collections.abc import Sequence

from .measure import Trial


def table(trials: Sequence[Trial], chosen: Trial | None) -> str:
    """The trade-off as text: settings numbered as in `text_plot`, an arrow at the chosen one."""
    width = max(len(t.label) for t in trials)
    lines = [f"      {'setting':<{width}}  kept  s per image  times faster   LPIPS"]
    for number, t in enumerate(trials, 1):
        mark = "->" if t is chosen else "  "
        lines.append(
            f"{mark} {number:>2} {t.label:<{width}}  {t.kept:4.0%}  {t.seconds:11.2f}  {t.times_faster:12.2f}  {t.lpips:6.4f}"
        )
    return "\n".join(lines)


def text_plot(trials: Sequence[Trial], width: int = 60, height: int = 12) -> str:
    """LPIPS (upward) over times faster (rightward) as text; each point is its setting's number in the table."""
    grid = [[" "] * (width + 1) for _ in range(height + 1)]
    low, high = min(t.times_faster for t in trials), max(t.times_faster for t in trials)
    top = max(t.lpips for t in trials)
    for number, t in enumerate(trials, 1):
        column = round((t.times_faster - low) / (high - low or 1) * width)
        grid[height - round(t.lpips / (top or 1) * height)][column] = str(number % 10)
    rows = ["  |" + "".join(row).rstrip() for row in grid]
    axis = f"{low:.2f}" + f"{high:.2f} times faster".rjust(width - 3)
    return "\n".join([f"LPIPS, top {top:.4f}", *rows, "  +" + "-" * (width + 1), "   " + axis])
