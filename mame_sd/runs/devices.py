"""Choose devices and number formats by name."""

from __future__ import annotations

import torch

from mame_sd.errors import UserError


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device of a name, or raise UserError if this machine has no such device.

    "auto" is the fastest one; "auto" and "cuda" mean the CUDA device of number `local_rank`.
    """
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    there = ["cpu", *cuda, *["mps"] * torch.backends.mps.is_available()]
    if name == "auto":
        name = "cuda" if cuda else there[-1]
    named = {"cuda": f"cuda:{local_rank}", "cpu:0": "cpu", "mps:0": "mps"}.get(name, name)
    if named not in there:
        raise UserError(
            f"--device {name}: expected auto or a device of this machine ({', '.join(there)}); give"
            " one of these"
        )
    return torch.device(named)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the number format that `name`, one of `DTYPES` or "auto", means on a device."""
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_argument(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the argument of diffusers' `from_pretrained` for a number format.

    Versions before 0.40 have another name for it, and ignore this one.
    """
    import diffusers  # slow, and only this function needs it

    version = diffusers.__version__.split(".")
    return {"dtype" if (int(version[0]), int(version[1])) >= (0, 40) else "torch_dtype": dtype}
