"""What describes one's own transformer to `apply_mame`: see `mame_sd.diffusion.families.family`."""

from mame_sd.diffusion.families.family import Family, Rows, register_family
from mame_sd.diffusion.tokens import Call, Tokens

__all__ = ["Call", "Family", "Rows", "Tokens", "register_family"]
