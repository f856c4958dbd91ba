"""What graphics cards do in a second, and how long a kernel takes on one: reckoned, not measured.

A kernel takes the longest of three times: that of the smallest kernel, its bytes at the memory's
speed, its products at the units' speed. Cards are told by their name, or by their processors,
clocks and memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from benchmarks.launches import Work
from mame_sd.core.min_tokens import FUSED, MIN_TOKENS

SMALLEST = 2.5e-6  # seconds: no kernel takes less
LAUNCH = 6e-6  # seconds in which PyTorch launches one kernel from Python, at best
SLOW_LAUNCH = 27e-6  # and where its dispatcher is slow
MEMORY = 0.8  # share of the printed bandwidth that a kernel sees
SINGLE = 0.65  # share of the peak that products of fp32 reach
MASKED = 0.65  # of the speed of attention: that of attention with a mask


@dataclass(frozen=True)
class Card:
    """What one kind of card does in a second, as its maker prints it, and the shares of it that are
    reached.

    Attributes:
        name: as PyTorch names the card.
        bandwidth: bytes of its memory.
        half: products of fp16 and bf16 with sums in fp32, FLOPs.
        single: products in fp32, FLOPs.
        products: the share of `half` that products and convolutions reach.
        attention: that which attention reaches.
    """

    name: str
    bandwidth: float
    half: float
    single: float
    products: float
    attention: float

    @property
    def harsh(self) -> Card:
        """The same card where attention and products reach three quarters of their peaks: the less
        time they take, the less there is to save.
        """
        return replace(self, products=0.75, attention=0.75)

    @property
    def min_tokens(self) -> int:
        """From how many tokens on layers merge on it by default (`mame_sd.core.min_tokens`)."""
        newest = self.name == "H100"
        return MIN_TOKENS["cuda, capability 9 and above" if newest else "cuda", FUSED]

    def seconds(self, work: Work) -> float:
        """How long the card is busy with one operation."""
        least = work.launches * SMALLEST
        return max(least, work.bytes / (MEMORY * self.bandwidth), work.flops / self.speed(work))

    def eager(self, work: Iterable[Work], launch: float = LAUNCH) -> float:
        """How long they take where each kernel is launched from Python, which may run ahead of the
        card.

        Args:
            launch: seconds for each kernel.
        """
        asked = done = 0.0
        for one in work:
            asked += one.launches * launch
            done = max(done, asked) + self.seconds(one)
        return done

    def speed(self, work: Work) -> float:
        """FLOPs in a second that an operation of this kind reaches.

        Raises:
            ValueError: attention or a convolution in fp32, which no model here has.
        """
        halves = work.dtype in (torch.float16, torch.bfloat16)
        if not halves and work.kind not in ("product", "other"):
            raise ValueError(f"expected {work.kind} in 16 bits, got {work.dtype}; cast the model")
        if "attention" not in work.kind:
            return self.products * self.half if halves else SINGLE * self.single
        used = work.width / (-(-work.width // 32) * 32)  # heads are padded to multiples of 32
        return self.attention * self.half * used * (MASKED if "masked" in work.kind else 1)


# Peaks are their makers', for sums in fp32. Shares of them are assumed to fit published times.
# Those of Stable Diffusion 1.5 are what diffusers' documentation measured on the 3090, the 4090 and
# the A100. Those of SDXL lie between what NVIDIA measured of PyTorch and of TensorRT on the H100. A
# 3060 is taken for a smaller 3090.
_GEFORCE = {"products": 0.77, "attention": 0.8}
CARDS = {
    card.name: card
    for card in (
        Card("GeForce RTX 3060", 0.36e12, 25.5e12, 12.7e12, **_GEFORCE),
        Card("GeForce RTX 3090", 0.936e12, 71e12, 35.6e12, **_GEFORCE),
        Card("GeForce RTX 4090", 1.008e12, 165e12, 82.6e12, **_GEFORCE),
        Card("A100", 1.555e12, 312e12, 19.5e12, products=0.38, attention=0.55),
        Card("H100", 3.35e12, 989e12, 67e12, products=0.3, attention=0.4),
    )
}
