"""What depends on the device, above all from how many tokens on a layer merges: the one table.

It is deterministic, so that a seed gives the same image on the same kind of device. The counts for
cards are reckoned at harsh assumptions (docs/gpu.md); `MaMeHandle.calibrate` measures instead.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache

import torch
from torch import Tensor

MIN_TOKENS = {
    "cpu": 1024,
    "mps": 1024,
    "cuda": 8192,  # below compute capability 9, and ROCm
    "cuda, capability 9 and above": 24576,
    "other": 4096,
}


@lru_cache(maxsize=64)
def kind_of(device: torch.device) -> str:
    """The entry of `MIN_TOKENS` for a device."""
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available():
        newest = torch.cuda.get_device_capability(device)[0] >= 9
        return "cuda, capability 9 and above" if newest else "cuda"
    return device.type if device.type in MIN_TOKENS else "other"


def least_tokens(given: int | None, device: torch.device) -> int:
    """The number of tokens from which on a layer merges: the given one, or the device's."""
    return MIN_TOKENS[kind_of(device)] if given is None else given


def too_few(given: int | None, device: torch.device) -> str:
    """Why a layer with fewer tokens is left alone."""
    if given is not None:
        return f"fewer than min_tokens={given}"
    kind = kind_of(device)
    return f"fewer than {MIN_TOKENS[kind]} tokens, the min_tokens of {kind}"


def no_autocast(t: Tensor) -> contextlib.AbstractContextManager[None]:
    """Autocast off on the device of `t`, where it is on."""
    kind = t.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()
