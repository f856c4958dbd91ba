"""Choose among measured settings, and say all of the chosen one for a file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError

from .measure import BASELINE, FLOOR, Trial

LPIPS_FLOOR = 0.10  # of mean attention, at least, on prompts that can tell settings apart
SEEN = 5e-5  # of LPIPS: less is .0000 in the table


def check_wish(max_lpips: float | None, speed: float | None) -> None:
    """Raises UserError unless one of the two is given, and is a number that can be reached."""
    if (max_lpips is None) == (speed is None):
        came = "neither" if max_lpips is None else "both"
        raise UserError(
            f"expected one of --max-lpips or --speed, got {came}; say which of them matters"
        )
    if max_lpips is not None and not 0 < max_lpips < math.inf:
        raise UserError(f"--max-lpips: expected a number above 0, got {max_lpips}; try 0.05")
    if speed is not None and not 1 < speed < math.inf:
        raise UserError(f"--speed: expected a number above 1, got {speed}; try 1.2")


def choose(trials: Sequence[Trial], max_lpips: float | None, speed: float | None) -> Trial:
    """The fastest trial of at most `max_lpips`, or the one of least LPIPS that is at least `speed`
    times faster.

    Raises UserError when there is none, naming the nearest, or where the images can't tell settings
    apart.
    """
    ours = [t for t in trials if t.config is not None]
    if all(t.lpips < SEEN for t in ours):
        raise UserError(
            "expected prompts whose images change where layers merge, got an LPIPS of .0000 in"
            " every row, which tells no setting from another; give other prompts, more of them, or"
            " larger images"
        )
    fastest = max(ours, key=lambda t: t.times_faster)
    if fastest.times_faster <= 1:
        raise UserError(
            "expected a setting that is faster than no merging, got none: the fastest,"
            f" {fastest.label}, is {fastest.times_faster:.2f} times as fast; leave merging off"
            " here, or make larger images"
        )
    if max_lpips is not None:
        fit = [t for t in ours if t.lpips <= max_lpips and t.times_faster > 1]
        if fit:
            return max(fit, key=lambda t: t.times_faster)
        near = min((t for t in ours if t.times_faster > 1), key=lambda t: t.lpips)
        wish = f"LPIPS of at most {max_lpips:g} that is faster than no merging"
    else:
        assert speed is not None
        fit = [t for t in ours if t.times_faster >= speed]
        if fit:
            return min(fit, key=lambda t: t.lpips)
        near = fastest
        wish = f"at least {speed:g} times the speed"
    raise UserError(
        f"expected a setting with {wish}, the nearest is {near.label}: LPIPS {near.lpips:.4f}, "
        f"{near.times_faster:.2f} times faster; ask for less"
    )


def remarks(trials: Sequence[Trial], best: Trial) -> list[str]:
    """What a reader must know before the choice is believed."""
    found = {t.label: t for t in trials}
    floor, itself = found[FLOOR], found[BASELINE]
    lines = [
        f"without any attention (mean attention) LPIPS is {floor.lpips:.4f}: "
        + (
            "these prompts can tell settings apart"
            if floor.lpips >= LPIPS_FLOOR
            else (
                f"below {LPIPS_FLOOR:.2f}, so these prompts hardly tell settings apart; give"
                " others, or larger images"
            )
        )
    ]
    if best.interval is None:
        lines.append("one prompt gives no interval; give more (--num)")
    spread = max(t.quartiles[1] - t.quartiles[0] for t in (itself, best))
    if spread > abs(best.times_faster - 1):
        lines.append(
            f"times spread by {spread:.2f}, more than is gained; measure on a quiet machine, or"
            " with more prompts"
        )
    return lines


def concrete(config: MaMeConfig) -> dict[str, Any]:
    """All of `config` for a file that no later version's defaults change."""
    fields = {name: value for name, value in config.to_dict().items() if value is not None}
    keys = {f.name for f in dataclasses.fields(MaMeConfig) if f.metadata.get("method") == "keys"}
    tokens = {
        f.name for f in dataclasses.fields(MaMeConfig) if f.metadata.get("method") == "tokens"
    }
    return {
        name: value
        for name, value in fields.items()
        if name not in (tokens if config.method == "keys" else keys)
    }


def measured(trials: Sequence[Trial], best: Trial) -> dict[str, Any]:
    """What a file says of how the chosen setting did on prompts that it was not found on."""
    uniform = next(t for t in trials if t.config is not None)

    def said(t: Trial) -> dict[str, Any]:
        return {
            "times_faster": round(t.times_faster, 3),
            "lpips": round(t.lpips, 5),
            "lpips_interval": (
                None if t.interval is None else [round(bound, 5) for bound in t.interval]
            ),
        }

    return {"chosen": said(best), "uniform": said(uniform)}
