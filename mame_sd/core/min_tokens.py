"""Choose the smallest number of tokens at which a layer merges, if `min_tokens` is not given.

Merging costs a fixed time and saves a share of the attention's time. The latter depends on the
kernel that PyTorch would run: a fused kernel (such as FlashAttention) is 3 to 20 times as fast as
the unfused one, which writes all scores to memory. So the rule asks PyTorch for that kernel
(`kernel_of`), and looks the number of tokens up in a table (`MIN_TOKENS`). Nothing waits for the
device, and a seed gives the same image on the same machine.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from mame_sd.core.groups import no_modes

FUSED, UNFUSED = "fused", "unfused"
# Smallest number of tokens at which a layer merges, by device and kernel. For GPUs it is estimated
# from the time of merging, 2.7 ms a layer from Python (measured on an H200, docs/gpu.md), and from
# the time of attention at harsh assumptions. For CPUs it is measured (docs/results.md).
# `MaMeHandle.calibrate` measures each layer instead.
MIN_TOKENS: dict[tuple[str, str], int] = {
    ("cpu", FUSED): 1024,
    ("cpu", UNFUSED): 576,
    ("mps", FUSED): 4096,
    ("mps", UNFUSED): 1024,
    ("cuda", FUSED): 16384,
    ("cuda", UNFUSED): 4096,
    ("cuda, GeForce of capability 8.6", FUSED): 16384,
    ("cuda, GeForce of capability 8.6", UNFUSED): 4096,
    ("cuda, capability 9 and above", FUSED): 24576,
    ("cuda, capability 9 and above", UNFUSED): 8192,
    ("other", FUSED): 16384,
    ("other", UNFUSED): 4096,
}
# Smallest number of tokens per channel at which the default merges keys. Attention over L keys is
# L / (L + 6 C) of the work of a block with C channels. Below 4 it is less than two fifths. There a
# quarter of the keys gains 2 to 7 %, and changes photographs more than restoring MLPs or blocks
# does (docs/restoring.md).
MIN_TOKENS_PER_CHANNEL = 4
# Smallest number of operations at which an MLP or a block is restored by default. It is estimated
# as 16 B L C^2, the operations of an MLP four times as wide as its C channels, over L tokens of B
# samples. Restoring costs about 2 ms a layer from Python on a GPU. On an H200 an MLP of 2.5e12 is
# 1.8 times as fast, one of .6e12 half as fast (docs/gpu.md). GeForce cards of capability 8.6 (3050
# to 3090) are slow enough for a tenth. The number is measured for CPUs and estimated for others.
MIN_WORK: dict[str, float] = {
    "cpu": 1e9,
    "mps": 1e11,
    "cuda": 5e11,
    "cuda, GeForce of capability 8.6": 5e10,
    "cuda, capability 9 and above": 1.5e12,
    "other": 5e11,
}
# Smallest number of tokens at which an MLP or a block is restored by default: one tile. Fewer were
# not measured, and an eighth of the 64 tokens in the middle of SD 1.5 would be 8 of 1,280 channels.
MIN_TOKENS_RESTORED = 1024
# Smallest number of channels at which a layer is restored by default on GPUs. The time of an MLP
# and that of restoring it both grow with the tokens. So a narrow layer in a large batch has enough
# work but gains nothing: with 640 channels a 4090 is estimated to take 1.1 times as long, an A100
# 1.2 times as long.
MIN_CHANNELS: dict[str, int] = {
    "cuda": 1280,
    "cuda, GeForce of capability 8.6": 640,
    "cuda, capability 9 and above": 2048,
    "other": 1280,
}
# Prefix of the reason why the default does not merge a layer.
BY_DEFAULT = "not merged by default: "
_MPS_WIDTHS = (64, 128)  # widths of heads with fused kernels on MPS from torch 2.13 on


class Kernel(NamedTuple):
    """The attention kernel that would run.

    Attributes:
        device: kind of device, a key of `MIN_TOKENS`.
        kind: FUSED or UNFUSED.
    """

    device: str
    kind: str

    @property
    def least(self) -> int:
        """Return the smallest number of tokens at which merging saves time."""
        return MIN_TOKENS[self]

    @property
    def too_few(self) -> str:
        """Return why a layer with fewer tokens is not merged."""
        where = {"cpu": "CPU", "mps": "Mac"}.get(self.device, "card")
        return (
            f"{BY_DEFAULT}fewer than {self.least:,} tokens by {self.kind} attention gain nothing"
            f" on this {where}"
        )


class Machine(NamedTuple):
    """Answers of PyTorch about attention on a device.

    Attributes:
        device: type of the device, "cuda" on ROCm too.
        capability: compute capability of an NVIDIA GPU. None for other devices.
        torch: (major, minor) of PyTorch's version.
        runs_fused: True if PyTorch would run a fused kernel. None if it can't be asked.
        name: name of an NVIDIA GPU.
    """

    device: str
    capability: tuple[int, int] | None
    torch: tuple[int, int]
    runs_fused: bool | None
    name: str = ""


def kernel_on(machine: Machine, width: int) -> Kernel:
    """Return the kernel that runs on a machine for heads of a width."""
    kind = machine.device if (machine.device, FUSED) in MIN_TOKENS else "other"
    if machine.capability is not None and machine.capability[0] >= 9:
        kind = "cuda, capability 9 and above"
    elif machine.capability == (8, 6) and "GeForce" in machine.name:
        kind = "cuda, GeForce of capability 8.6"
    fused = machine.runs_fused
    if machine.device == "mps":  # PyTorch can't be asked about MPS
        fused = machine.torch >= (2, 13) and width in _MPS_WIDTHS
    # If the kernel is unknown, assume the fused one, under which merging saves less.
    return Kernel(kind, UNFUSED if fused is False else FUSED)


def kernel_of(device: torch.device, dtype: torch.dtype = torch.float32, width: int = 64) -> Kernel:
    """Return the kernel that PyTorch would run for attention without a mask.

    A user's `kernel=` doesn't change the result, because unmerged calls don't run it.

    Args:
        device: device of the tensors.
        dtype: dtype of queries, keys and values.
        width: width of a head.
    """
    return Kernel(*_kernel(str(device), str(dtype), width))


@torch.compiler.assume_constant_result  # compilers can't trace these calls
def _kernel(device: str, dtype: str, width: int) -> tuple[str, str]:
    allowed: tuple[bool, ...] = (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )
    kernel = kernel_on(asked(device, dtype, width, allowed), width)
    return kernel.device, kernel.kind


@lru_cache(maxsize=256)
def asked(device: str, dtype: str, width: int, allowed: tuple[bool, ...] = ()) -> Machine:
    """Ask PyTorch about attention on a device. Answers are cached.

    Args:
        device: name of the device as PyTorch writes it, such as "cuda:0".
        dtype: name of the dtype as PyTorch writes it, such as "torch.float16".
        width: width of a head.
        allowed: for each fused kernel, True if the user allows it
            (`torch.nn.attention.sdpa_kernel`).
    """
    where = torch.device(device)
    there = where.type != "cuda" or _is_card(where)
    capability, name = None, ""
    if where.type == "cuda" and there and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(where)
        name = torch.cuda.get_device_name(where)
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    fused: bool | None = None
    if there and where.type not in ("mps", "meta"):
        with torch.inference_mode(False), no_modes():
            one = torch.empty(1, 1, 64, width, device=where, dtype=getattr(torch, dtype[6:]))
            backend = backend_of(one)
        fused = None if backend is None else backend not in (SDPBackend.MATH, SDPBackend.ERROR)
    return Machine(where.type, capability, (version[0], version[1]), fused, name)


def backend_of(q: Tensor, mask: Tensor | None = None) -> SDPBackend | None:
    """Return the backend that PyTorch would choose for self-attention of q [B, H, N, D].

    Args:
        q: queries, which are keys and values too.
        mask: added to the logits, if any.

    Returns:
        The backend, or None if the device can't be asked, such as MPS.
    """
    if q.device.type == "mps":
        return None
    try:
        return SDPBackend(torch._fused_sdp_choice(q, q, q, mask))
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return None


def _is_card(device: torch.device) -> bool:
    """Return True if this machine has that CUDA device.

    Benchmarks may pretend to have one (benchmarks/launches.py).
    """
    return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()


def too_little_work(x: Tensor, count: int | None = None) -> str:
    """Return why a layer with the tokens x [B, L, C] is not restored by default.

    The reason is empty if the layer is restored. `count` is the number of the image's tokens; if
    None, all are.
    """
    count = x.shape[1] if count is None else count
    if count < MIN_TOKENS_RESTORED:
        return f"{BY_DEFAULT}a fit needs {MIN_TOKENS_RESTORED:,} tokens, and it has {count:,}"
    device = kernel_of(x.device, x.dtype).device
    batch, tokens, channels = x.shape
    is_wide = channels >= MIN_CHANNELS.get(device, 0)
    if is_wide and 16 * batch * tokens * channels**2 >= MIN_WORK[device]:
        return ""
    where = {"cpu": "CPU", "mps": "Mac"}.get(device, "card")
    return f"{BY_DEFAULT}{tokens:,} tokens of {channels:,} channels gain nothing on this {where}"


def too_wide(tokens: int, channels: int) -> str:
    """Return why the default does not merge the keys of so few tokens for their channels.

    The reason is empty if they merge.
    """
    if tokens >= MIN_TOKENS_PER_CHANNEL * channels:
        return ""
    return f"{BY_DEFAULT}keys of {tokens:,} tokens are a small part of {channels:,} channels' work"


def head_width(attention: nn.Module) -> int:
    """Return the width of a head of an attention module, or 64 if it is unknown."""
    of: Any = attention
    for name in ("dim_head", "head_dim", "attention_head_dim"):
        if isinstance(width := getattr(of, name, None), int) and width > 0:
            return width
    heads = getattr(of, "heads", None) or getattr(of, "num_heads", None)
    inner = getattr(of, "inner_dim", None) or getattr(of, "query_dim", None)
    if isinstance(heads, int) and isinstance(inner, int) and heads > 0 and inner >= heads:
        return inner // heads
    return 64
