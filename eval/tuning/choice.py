"""Choose among measured settings, and say all of the chosen one for a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError

from .measure import Trial


def choose(trials: Sequence[Trial], max_lpips: float | None, min_speedup: float | None) -> Trial:
    """The fastest trial of at most `max_lpips`, or the one of least LPIPS that is at least `min_speedup` times faster.

    Raises UserError when there is none: it names the nearest.
    """
    if max_lpips is not None:
        fit = [t for t in trials if t.lpips <= max_lpips and t.times_faster > 1]
        if fit:
            return max(fit, key=lambda t: t.times_faster)
        near = min(trials, key=lambda t: t.lpips)
        wish = f"LPIPS of at most {max_lpips:g} that is faster than no merging"
    else:
        assert min_speedup is not None
        fit = [t for t in trials if t.times_faster >= min_speedup]
        if fit:
            return min(fit, key=lambda t: t.lpips)
        near = max(trials, key=lambda t: t.times_faster)
        wish = f"at least {min_speedup:g} times the speed"
    raise UserError(
        f"expected a setting with {wish}, the nearest is {near.label}: LPIPS {near.lpips:.4f}, "
        f"{near.times_faster:.2f} times faster; ask for less"
    )


def whole(config: MaMeConfig) -> dict[str, Any]:
    """All of `config` for a file that no later version's defaults change.

    What follows from keep (the cell, `merge`, `batch`) is left to it unless it was given, so that another tau or keep can
    take its place.
    """
    fields = {name: value for name, value in config.to_dict().items() if value is not None}
    left = {"stride", "merge"} - config.given.keys() | {"batch"}
    rest = {name: value for name, value in fields.items() if name not in left}
    return rest if MaMeConfig.from_dict(rest) == config else fields
