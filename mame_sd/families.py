"""Export what is needed to describe your own transformer to `apply_mame`.

See `mame_sd.diffusion.families.family`. `patches`, `pixels`, `packed` and `in_sequence` are layouts
of diffusers' models. `along` names arguments with a row per token.
"""

from mame_sd.diffusion.context import Call, Tokens
from mame_sd.diffusion.families.family import Family, Rows, register_family
from mame_sd.diffusion.families.layouts import (
    along,
    in_sequence,
    packed,
    patches,
    pixels,
)

__all__ = [
    "Call",
    "Family",
    "Rows",
    "Tokens",
    "along",
    "in_sequence",
    "packed",
    "patches",
    "pixels",
    "register_family",
]
