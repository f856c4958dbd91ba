"""Measured settings as text: a table, and a plot of LPIPS over speed."""

from __future__ import annotations

from collections.abc import Sequence

from .measure import Trial


def table(trials: Sequence[Trial], chosen: Trial | None) -> str:
    """The trade-off as text: settings numbered as in `text_plot`, an arrow at the chosen one.

    Quartiles of times, and the 95 % interval of the mean LPIPS over prompts, stand in brackets.
    """
    width = max(len(t.label) for t in trials)
    lines = [f"      {'setting':<{width}}  kept  s per image  times faster         LPIPS"]
    for number, t in enumerate(trials, 1):
        mark = "->" if t is chosen else "  "
        faster = f"{t.times_faster:.2f} ({t.quartiles[0]:.2f} - {t.quartiles[1]:.2f})"
        near = "" if t.interval is None else f" ({t.interval[0]:.4f} - {t.interval[1]:.4f})"
        lines.append(
            f"{mark} {number:>2} {t.label:<{width}}  {t.kept:4.0%}  {t.seconds:11.2f}  {faster:<19}"
            f"  {t.lpips:.4f}{near}"
        )
    return "\n".join(lines)


def text_plot(trials: Sequence[Trial], width: int = 60, height: int = 12) -> str:
    """LPIPS (upward) over times faster (rightward) as text; each point is its setting's number in
    the table.
    """
    grid = [[" "] * (width + 1) for _ in range(height + 1)]
    low, high = min(t.times_faster for t in trials), max(t.times_faster for t in trials)
    top = max(t.lpips for t in trials)
    for number, t in enumerate(trials, 1):
        column = round((t.times_faster - low) / (high - low or 1) * width)
        grid[height - round(t.lpips / (top or 1) * height)][column] = str(number % 10)
    rows = ["  |" + "".join(row).rstrip() for row in grid]
    axis = f"{low:.2f}" + f"{high:.2f} times faster".rjust(width - 3)
    return "\n".join([f"LPIPS, top {top:.4f}", *rows, "  +" + "-" * (width + 1), "   " + axis])
