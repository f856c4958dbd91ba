"""What graphics cards do in a second, and how long a kernel takes on one: reckoned, not measured.

A kernel takes the longest of three times: that of the smallest kernel, its bytes at the memory's
speed, its products at the units' speed. Cards are told by their name, or by their processors,
clocks and memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

SMALLEST = 2.5e-6  # seconds: no kernel takes less
LAUNCH = 6e-6  # seconds in which PyTorch launches one kernel from Python, at best
MEMORY = 0.8  # share of the printed bandwidth that a kernel sees
SINGLE = 0.65  # share of the peak that products and convolutions of fp32 reach
THIRDS = 0.7  # and attention of fp32, of a third of TF32's peak
MASKED = 0.65  # of the speed of attention: that of attention with a mask


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
    """What one kind of card does in a second, as its maker prints it, and the shares of it that are
    reached.

    Attributes:
        name: as PyTorch names the card.
        bandwidth: bytes of its memory.
        half: products of fp16 and bf16 with sums in fp32, FLOPs.
        tf32: products of fp32 rounded to TF32, FLOPs; 0: it has none.
        single: products in fp32, FLOPs.
        products: the share of `half` that products and convolutions reach.
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
        """FLOPs in a second that an operation of this kind reaches."""
        halves, attends = work.dtype in (torch.float16, torch.bfloat16), "attention" in work.kind
        if not attends:
            # PyTorch lets cuDNN round fp32 to TF32, and other products not.
            full = self.tf32 if work.kind == "convolution" and self.tf32 else self.single
            return self.products * self.half if halves else SINGLE * full
        # Attention of fp32 is three products in TF32 (`OpMultiplyAddFastF32` in PyTorch's
        # mem_eff_attention).
        full = (
            self.attention * self.half if halves else THIRDS * self.tf32 / 3 or SINGLE * self.single
        )
        used = work.width / (-(-work.width // 32) * 32)  # heads are padded to multiples of 32
        return full * used * (MASKED if work.kind == "masked attention" else 1)


# Peaks are their makers', for sums in fp32. Shares of them are assumed to fit published times.
# Those of Stable Diffusion 1.5 are what diffusers' documentation measured on the 3090, the 4090 and
# the A100. Those of SDXL lie between what NVIDIA measured of PyTorch and of TensorRT on the H100. A
# 3060 is taken for a smaller 3090. `benchmarks.gpu` prints how far off.
_GEFORCE = {"products": 0.77, "attention": 0.8}
CARDS = {
    card.name: card
    for card in (
        Card("GeForce RTX 3060", 0.36e12, 25.5e12, 12.7e12, 12.7e12, **_GEFORCE),
        Card("GeForce RTX 3090", 0.936e12, 71e12, 35.6e12, 35.6e12, **_GEFORCE),
        Card("GeForce RTX 4090", 1.008e12, 165e12, 82.6e12, 82.6e12, **_GEFORCE),
        Card("A100", 1.555e12, 312e12, 156e12, 19.5e12, products=0.38, attention=0.55),
        Card("H100", 3.35e12, 989e12, 494e12, 67e12, products=0.3, attention=0.4),
    )
}
# Products of fp16 with sums in fp32, and of fp32, that one multiprocessor does in a clock, FLOPs,
# by compute capability. GeForce cards from 8.6 on do half of what other cards of the same
# generation do; they are taken for these.
_OF_A_CLOCK = {
    (7, 0): (1024, 128),
    (7, 5): (512, 128),
    (8, 0): (2048, 128),
    (8, 6): (512, 256),
    (8, 9): (512, 256),
    (9, 0): (4096, 256),
    (10, 0): (8192, 256),
    (12, 0): (512, 256),
}
_MEASURED = "MAME_SD_CARDS"  # the file of measured figures, where it is not the usual one
_found: dict[str, Card | None] = {}


def card_of(device: str) -> Card | None:
    """The card that a CUDA device is, by name or by what it says of itself; None: nothing is known
    of it. Looked at once.

    Figures that were measured on a card of that name (`measured_file`) come first.
    """
    if device not in _found:
        _found[device] = _look_up(device)
    return _found[device]


@contextmanager
def taken_for(device: str, card: Card | None) -> Iterator[None]:
    """For the block, a device is said to be a card; None: one of which nothing is known."""
    before = dict(_found)
    _found[device] = card
    try:
        yield
    finally:
        _found.clear()
        _found.update(before)


def measured_file() -> Path:
    """Where figures of cards are that were measured."""
    return Path(os.environ.get(_MEASURED) or Path.home() / ".cache" / "mame-sd" / "cards.json")


def _look_up(device: str) -> Card | None:
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    seen = torch.cuda.get_device_properties(device)
    return _measured(seen.name) or _named(seen.name) or _by_properties(seen)


def _measured(name: str) -> Card | None:
    try:
        return Card(**json.loads(measured_file().read_text(encoding="utf-8"))[name])
    except (OSError, ValueError, KeyError, TypeError):  # none, or of another version
        return None


def _named(name: str) -> Card | None:
    """The known card of a name: all of its words, and none that makes it another one."""
    words = set(name.replace("-", " ").replace("_", " ").split())
    for card in CARDS.values():
        if set(card.name.split()) <= words and not words & {
            "Ti",
            "SUPER",
            "Laptop",
            "PCIe",
            "NVL",
            "MIG",
        }:
            return card
    return None


def _by_properties(seen: Any) -> Card | None:
    """A card from what its driver says of it."""
    half, single = _OF_A_CLOCK.get((seen.major, seen.minor), (0, 0))
    clock = (
        1e3 * getattr(seen, "clock_rate", 0) * seen.multi_processor_count
    )  # clocks of all of them in a second
    bits = 2 * 1e3 * getattr(seen, "memory_clock_rate", 0) * getattr(seen, "memory_bus_width", 0)
    if not half or not clock or not bits:
        return None
    like = (
        CARDS["H100"]
        if seen.major in (9, 10)
        else CARDS["A100"]
        if (seen.major, seen.minor) == (8, 0)
        else None
    )
    shares = _GEFORCE if like is None else {"products": like.products, "attention": like.attention}
    tf32 = 0.0 if seen.major < 8 else half * clock / 2
    return Card(seen.name, bits / 8, half * clock, tf32, single * clock, **shares)
