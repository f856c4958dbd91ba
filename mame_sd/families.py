"""What describes one's own transformer to `apply_mame`: see `mame_sd.diffusion.families.family`."""

from mame_sd.diffusion.families.family import Call, Family, Rows, Tokens, register_family

__all__ = ["Call", "Family", "Rows", "Tokens", "register_family"]
