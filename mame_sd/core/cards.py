"""What graphics cards do in a second, and how long a kernel takes on one: reckoned, not measured.

A kernel takes the longest of three times: that of the smallest kernel, its bytes at the memory's speed, its products at
the speed of the units that do them. Cards are told by their name, or by their processors, clocks and memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

SMALLEST = 2.5e-6  # seconds: no kernel takes less
LAUNCH = 6e-6  # seconds in which PyTorch launches one kernel from Python, at best
MEMORY = 0.8  # share of the printed bandwidth that a kernel sees
SINGLE = 0.8  # share of the peak that products in fp32 reach
MASKED = 0.65  # of the speed of attention: that of attention with a mask


_HALVES = (torch.float16, torch.bfloat16)


class Work(NamedTuple):
    """One operation of a graphics card.

    Attributes:
        name: of the operation.
        kind: "product", "convolution", "attention", "masked attention", or "other".
        dtype: of its inputs.
        bytes: read and written.
        flops: two for each multiplication and addition.
        launches: kernels that it is made of.
        width: of a head, with attention.
    """

    name: str
    kind: str
    dtype: torch.dtype
    bytes: float
    flops: float
    launches: int = 1
    width: int = 0


@dataclass(frozen=True)
class Card:
    """What one kind of card does in a second, as its maker prints it, and the shares of it that are reached.

    Attributes:
        name: as PyTorch names the card.
        bandwidth: bytes of its memory.
        half: products of fp16 and bf16 with sums in fp32, FLOPs.
        tf32: products of fp32 rounded to TF32, FLOPs; 0: it has none.
        single: products in fp32, FLOPs.
        products: the share of these peaks that products and convolutions reach.
        attention: that which attention reaches.
    """

    name: str
    bandwidth: float
    half: float
    tf32: float
    single: float
    products: float
    attention: float

    def seconds(self, work: Work) -> float:
        """How long the card is busy with one operation."""
        least = work.launches * SMALLEST
        return max(least, work.bytes / (MEMORY * self.bandwidth), work.flops / self.speed(work))

    def busy(self, work: Iterable[Work]) -> float:
        """How long it is busy with all of them, one after the other."""
        return sum(map(self.seconds, work))

    def eager(self, work: Iterable[Work], launch: float = LAUNCH) -> float:
        """How long they take where each kernel is launched from Python, which may run ahead of the card.

        Args:
            launch: seconds for each kernel.
        """
        asked = done = 0.0
        for one in work:
            asked += one.launches * launch
            done = max(done, asked) + self.seconds(one)
        return done

    def speed(self, work: Work) -> float:
        """FLOPs in a second that an operation of this kind reaches."""
        if "attention" in work.kind:
            used = work.width / (-(-work.width // 32) * 32)  # heads are padded to multiples of 32
            return self.attention * self._of_tensors(work) * used * (MASKED if work.kind == "masked attention" else 1)
        # PyTorch lets cuDNN round fp32 to TF32, and other products not.
        if work.dtype in _HALVES or (work.kind == "convolution" and self.tf32):
            return self.products * self._of_tensors(work)
        return SINGLE * self.single

    def _of_tensors(self, work: Work) -> float:
        if work.dtype in _HALVES:
            return self.half
        # Attention of fp32 is three products in TF32 (`OpMultiplyAddFastF32` in PyTorch's mem_eff_attention).
        return self.tf32 / (3 if "attention" in work.kind else 1) or self.single
