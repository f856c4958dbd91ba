"""A card's own figures, measured: what the reckoning assumes of a card of which nothing is
known.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F

from mame_sd.core.cards import MEMORY, SINGLE, Card
from mame_sd.eval.timing import timed

HALF = torch.float16
ROUNDS = 20


@torch.no_grad()
def measured_card(device: torch.device, name: str, side: int = 4096) -> Card:
    """The figures that kernels of this size reach on a device.

    Args:
        device: a CUDA device.
        name: of the card.
        side: rows and columns of the products, and tokens of the attention.
    """

    def made(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def fastest(call: Callable[[], object]) -> float:
        return min(timed(call, device)[1] for _ in range(ROUNDS))

    half, single = made(side, side), made(side, side, dtype=torch.float32)
    copy, heads = torch.empty_like(single), made(2, 8, side, 64)
    image, kernel = (
        made(2, 320, side // 32, side // 32, dtype=torch.float32),
        made(320, 320, 3, 3, dtype=torch.float32),
    )
    product, pixels = 2.0 * side**3, 2.0 * image.numel() * 320 * 9
    reached = product / fastest(lambda: half @ half)
    attention = (
        4
        * 2
        * 8
        * side**2
        * 64
        / fastest(lambda: F.scaled_dot_product_attention(heads, heads, heads))
    )
    bandwidth = 2 * single.nbytes / fastest(lambda: copy.copy_(single))
    in_single = product / fastest(lambda: single @ single)
    in_tf32 = pixels / fastest(lambda: F.conv2d(image, kernel, padding=1))
    return Card(
        name,
        bandwidth / MEMORY,
        reached,
        in_tf32 / SINGLE,
        in_single / SINGLE,
        1.0,
        attention / reached,
    )


def keep(card: Card, path: Path) -> None:
    """Puts a card's figures beside others in a file, where `mame_sd.core.cards` looks for them."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".part")
    whole.write_text(
        json.dumps({**known, card.name: asdict(card)}, indent=2) + "\n", encoding="utf-8"
    )
    whole.replace(path)
