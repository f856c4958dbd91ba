"""From how many tokens on a layer merges where `min_tokens` is left out.

Merging costs a fixed time, and saves a share of attention's. How long attention takes depends on
the kernel that PyTorch would run: a fused kernel (FlashAttention and its kin) is 3 to 20 times as
fast as the unfused one, which writes all scores to memory. So the rule asks PyTorch which kernel
that is (`kernel_of`), and looks the number of tokens up in one table (`MIN_TOKENS`). Nothing waits
for the device, and a seed gives the same image on the same machine.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from mame_sd.upstream import private

FUSED, UNFUSED = "fused", "unfused"
_no_modes = private("torch", "torch.utils._python_dispatch", "_disable_current_modes")
# From how many tokens on a layer merges, by device and kernel. On cards, where merging takes 2.7 ms
# a layer from Python (measured on an H200, docs/gpu.md), by that time and by how long attention
# takes at harsh assumptions; on CPUs as measured (docs/results.md). `MaMeHandle.calibrate` measures
# each layer instead.
MIN_TOKENS: dict[tuple[str, str], int] = {
    ("cpu", FUSED): 1024,
    ("cpu", UNFUSED): 576,
    ("mps", FUSED): 4096,
    ("mps", UNFUSED): 1024,
    ("cuda", FUSED): 16384,
    ("cuda", UNFUSED): 4096,
    ("cuda, capability 9 and above", FUSED): 24576,
    ("cuda, capability 9 and above", UNFUSED): 8192,
    ("other", FUSED): 16384,
    ("other", UNFUSED): 4096,
}
# From how many tokens a channel on the default merges keys. Attention over L keys is L / (L + 6 C)
# of the work of a block with C channels. Below 4 it is less than two fifths: a quarter of the keys
# gains 2 to 7 %, and on photographs costs more than all else (docs/restoring.md).
MIN_TOKENS_PER_CHANNEL = 4
# From how many operations (16 B L C^2: those of an MLP four times as wide as its C channels, over L
# tokens of B samples) on an MLP or a block is restored by default. Restoring costs about 2 ms a
# layer from Python on a card. On an H200 an MLP of 2.5e12 is 1.8 times as fast, one of .6e12 half
# as fast (docs/gpu.md); for other devices the number is estimated, for CPUs measured.
MIN_WORK: dict[str, float] = {
    "cpu": 1e9,
    "mps": 1e11,
    "cuda": 5e11,
    "cuda, capability 9 and above": 1.5e12,
    "other": 5e11,
}
# From how many tokens on an MLP or a block is restored by default: one tile. Nothing below was
# measured, and an eighth of the 64 tokens in the middle of SD 1.5 would be 8 of 1,280 channels.
MIN_TOKENS_RESTORED = 1024
# Begins the reason of a layer that the default leaves unmerged.
BY_DEFAULT = "not merged by default: "
_MPS_WIDTHS = (64, 128)  # of heads, for which MPS has fused kernels from torch 2.13 on


class Kernel(NamedTuple):
    """The attention kernel that would run.

    Attributes:
        device: a device's kind, as `MIN_TOKENS` has it.
        kind: FUSED or UNFUSED.
    """

    device: str
    kind: str

    @property
    def least(self) -> int:
        """The number of tokens from which on merging gains."""
        return MIN_TOKENS[self]

    @property
    def too_few(self) -> str:
        """Why a layer with fewer tokens is not merged."""
        where = {"cpu": "CPU", "mps": "Mac"}.get(self.device, "card")
        return (
            f"{BY_DEFAULT}fewer than {self.least:,} tokens by {self.kind} attention gain nothing"
            f" on this {where}"
        )


class Machine(NamedTuple):
    """What PyTorch answers about attention on a device.

    Attributes:
        device: its type, "cuda" on ROCm too.
        capability: of an NVIDIA card; None elsewhere.
        torch: (major, minor) of PyTorch's version.
        runs_fused: whether PyTorch would run a fused kernel; None where it can't be asked.
    """

    device: str
    capability: tuple[int, int] | None
    torch: tuple[int, int]
    runs_fused: bool | None


def kernel_on(machine: Machine, width: int) -> Kernel:
    """Return the kernel that runs on a machine for heads of a width."""
    kind = machine.device if (machine.device, FUSED) in MIN_TOKENS else "other"
    if machine.capability is not None and machine.capability[0] >= 9:
        kind = "cuda, capability 9 and above"
    fused = machine.runs_fused
    if machine.device == "mps":  # which can't be asked
        fused = machine.torch >= (2, 13) and width in _MPS_WIDTHS
    # Where nobody can tell, the kernel under which less is to be gained.
    return Kernel(kind, UNFUSED if fused is False else FUSED)


def kernel_of(device: torch.device, dtype: torch.dtype = torch.float32, width: int = 64) -> Kernel:
    """Return the kernel that PyTorch would run for attention without a mask.

    A kernel that the user gives (`kernel=`) doesn't change it: without merging PyTorch's own runs.

    Args:
        device: of the tensors.
        dtype: of queries, keys and values.
        width: of a head.
    """
    return Kernel(*_kernel(str(device), str(dtype), width))


@torch.compiler.assume_constant_result  # compilers can't follow the question
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
    """Ask PyTorch about attention on a device, once.

    Args:
        device: as PyTorch writes it, such as "cuda:0".
        dtype: the same, such as "torch.float16".
        width: of a head.
        allowed: which fused kernels the user allows (`torch.nn.attention.sdpa_kernel`).
    """
    where = torch.device(device)
    there = where.type != "cuda" or _is_card(where)
    capability = None
    if where.type == "cuda" and there and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(where)
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    fused: bool | None = None
    if there and where.type not in ("mps", "meta"):
        with torch.inference_mode(False), _no_modes():
            one = torch.empty(1, 1, 64, width, device=where, dtype=getattr(torch, dtype[6:]))
            backend = backend_of(one)
        fused = None if backend is None else backend not in (SDPBackend.MATH, SDPBackend.ERROR)
    return Machine(where.type, capability, (version[0], version[1]), fused)


def backend_of(q: Tensor, mask: Tensor | None = None) -> SDPBackend | None:
    """Return which of PyTorch's kernels would compute self-attention of q [B, H, N, D], with a mask
    to be added to the logits or without; None where the device can't be asked, as MPS.
    """
    if q.device.type == "mps":
        return None
    try:
        return SDPBackend(torch._fused_sdp_choice(q, q, q, mask))
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return None


def _is_card(device: torch.device) -> bool:
    """Whether this machine has that CUDA device (one may be pretended: benchmarks/launches.py)."""
    return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()


def least_tokens(
    given: int | None,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    width: int = 64,
) -> int:
    """Return the number of tokens from which on a layer merges.

    Args:
        given: the user's `min_tokens`; None: by the kernel that would run.
        device, dtype, width: as `kernel_of` takes them.
    """
    return kernel_of(device, dtype, width).least if given is None else given


def too_little_work(x: Tensor) -> str:
    """Return why a layer with the tokens x [B, L, C] is not restored by default; empty if it is."""
    device = kernel_of(x.device, x.dtype).device
    batch, tokens, channels = x.shape
    if tokens < MIN_TOKENS_RESTORED:
        return f"{BY_DEFAULT}a fit needs {MIN_TOKENS_RESTORED:,} tokens, and it has {tokens:,}"
    if 16 * batch * tokens * channels**2 >= MIN_WORK[device]:
        return ""
    where = {"cpu": "CPU", "mps": "Mac"}.get(device, "card")
    return f"{BY_DEFAULT}{tokens:,} tokens of {channels:,} channels gain nothing on this {where}"


def too_wide(tokens: int, channels: int) -> str:
    """Return why the default leaves the keys of so few tokens for their channels; else empty."""
    if tokens >= MIN_TOKENS_PER_CHANNEL * channels:
        return ""
    return f"{BY_DEFAULT}keys of {tokens:,} tokens are a small part of {channels:,} channels' work"


def head_width(attention: nn.Module) -> int:
    """Return the width of a head of an attention module, 64 where nothing tells."""
    of: Any = attention
    for name in ("dim_head", "head_dim", "attention_head_dim"):
        if isinstance(width := getattr(of, name, None), int) and width > 0:
            return width
    heads = getattr(of, "heads", None) or getattr(of, "num_heads", None)
    inner = getattr(of, "inner_dim", None) or getattr(of, "query_dim", None)
    if isinstance(heads, int) and isinstance(inner, int) and heads > 0 and inner >= heads:
        return inner // heads
    return 64
