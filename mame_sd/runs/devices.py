"""Devices by name, checked against what this machine has, and number formats."""

from __future__ import annotations

import torch

from mame_sd.errors import UserError


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device that `name` means here. Raises UserError when there is none such."""
    if name == "auto":
        name = (
            "cuda"
            if torch.cuda.is_available()
            else "mps"
            if torch.backends.mps.is_available()
            else "cpu"
        )
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        raise UserError(
            f"--device {name}: expected auto, cpu, cuda, cuda:N or mps; give one of these"
        ) from None
    if device.type == "cuda":
        count = torch.cuda.device_count()
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        if (device.index or 0) >= count:
            there = f"{count} of them" if count else "none"
            raise UserError(
                f"--device {device}: expected a CUDA device of this machine, which has {there};"
                " give --device cpu"
            )
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(
            "--device mps: expected a machine with Metal, which this one lacks; give --device cpu"
        )
    elif device.type not in ("cpu", "mps"):
        raise UserError(
            f"--device {name}: expected auto, cpu, cuda, cuda:N or mps; give one of these"
        )
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format that `name` (one of `DTYPES`, or auto) means on `device`."""
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype
