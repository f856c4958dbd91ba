"""Devices by name, checked against what this machine has, and number formats."""

from __future__ import annotations

import torch

from mame_sd.errors import UserError


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device that `name` means here. Raises UserError when there is none such."""
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
    """The number format that `name` (one of `DTYPES`, or auto) means on `device`."""
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    found: torch.dtype = getattr(torch, name)
    return found


def dtype_argument(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The argument of diffusers' `from_pretrained` that says in which number format to load.

    Before 0.40 it has another name there, and this one is passed over.
    """
    import diffusers  # slow, and no other function needs it

    version = diffusers.__version__.split(".")
    return {"dtype" if (int(version[0]), int(version[1])) >= (0, 40) else "torch_dtype": dtype}
