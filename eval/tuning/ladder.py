"""The settings that tuning tries, from mild to strong."""

from __future__ import annotations

from typing import Any

from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError

# The cell follows from keep, and merge is the preset's; what else is not named is as in the setting that tuning starts from.
LADDER: tuple[dict[str, Any], ...] = (
    {"keep": 0.75},
    {"keep": 0.5},
    {"keep": 0.375},
    {"keep": 0.25},
    {"keep": 0.19},
    {"keep": 0.125},
    {"keep": 0.0625},
    {"keep": 0.625, "merge": "qkv"},
    {"keep": 0.5, "merge": "qkv"},
    {"keep": 0.25, "merge": "qkv"},
)


def ladder_of(base: MaMeConfig) -> list[tuple[str, MaMeConfig]]:
    """The ladder's settings over `base`, labelled by what they change. Raises UserError where `base` allows no keep."""
    steps = []
    for fields in LADDER:
        label = ", ".join(f"{name} {value}" for name, value in fields.items())
        try:
            steps.append((label, base.replace(**{"stride": None, "merge": None, **fields})))
        except ValueError as error:
            raise UserError(f"merging: {error}; tune tries shares to keep") from error
    return steps
