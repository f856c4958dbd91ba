"""Devices by name, checked against what this machine has, and number formats."""

from __future__ import annotations

import torch

from mame_sd.errors import UserError


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device that `name` means here. Raises UserError when there is none such."""
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "mps" if has_mps else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda", "mps"):
        raise UserError(
            f"--device {name}: expected auto, cpu, cuda, cuda:N or mps; give one of these"
        )
    if device.type == "mps" and not has_mps:
        raise UserError(
            "--device mps: expected a machine with Metal, which this one lacks; give --device cpu"
        )
    if device.type == "cuda":
        count = torch.cuda.device_count()
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        if (device.index or 0) >= count:
            there = f"{count} of them" if count else "none"
            raise UserError(
                f"--device {device}: expected a CUDA device of this machine, which has {there};"
                " give --device cpu"
            )
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format that `name` (one of `DTYPES`, or auto) means on `device`."""
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype
