"""Devices by name, checked against what this machine has, and number formats."""

from __future__ import annotations

import re

import torch

from mame_sd.errors import UserError


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device that `name` means here. Raises UserError when there is none such."""
    has_mps = torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    if not re.fullmatch(r"cpu(:0)?|mps(:0)?|cuda(:[0-9]+)?", name):
        raise UserError(
            f"--device {name}: expected auto, cpu, cuda, cuda:N or mps; give one of these"
        )
    kind, _, number = name.partition(":")
    if kind == "mps" and not has_mps:
        raise UserError(
            "--device mps: expected a machine with Metal, which this one lacks; give --device cpu"
        )
    if kind != "cuda":
        return torch.device(kind)
    index, count = int(number or local_rank), torch.cuda.device_count()
    if index >= count:
        raise UserError(
            f"--device cuda:{index}: expected a CUDA device of this machine, which has"
            f" {count or 'none'}; give --device cpu"
        )
    return torch.device(kind, index)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format that `name` (one of `DTYPES`, or auto) means on `device`."""
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    found: torch.dtype = getattr(torch, name)
    return found
