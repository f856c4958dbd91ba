"""Random views of one layer."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.caches import CacheView


def view_of(
    tokens: int = 40,
    heads: int = 4,
    groups: int = 2,
    samples: int = 1,
    seed: int = 0,
    **fields: object,
) -> CacheView:
    """Make the view of a random layer whose rotation turns pairs of features by the position."""
    g = torch.Generator().manual_seed(seed)
    h, d = heads // groups, 8

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    slots = torch.arange(tokens)
    values: dict[str, object] = {
        "keys": rotate(draw(samples, h, tokens, d), slots.expand(samples, -1)),
        "values": draw(samples, h, tokens, d),
        "hidden_states": draw(samples, tokens, heads * d),
        "slots": slots.expand(samples, h, tokens),
        "seen": tokens,
        "tokens": torch.ones(samples, tokens, dtype=torch.bool),
        "scale": d**-0.5,
        "next": torch.full((samples,), tokens),
        "project": lambda x: x.view(*x.shape[:2], heads, d).transpose(1, 2),
        "rotate": rotate,
    }
    return CacheView(**{**values, **fields})  # type: ignore[arg-type]


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate x [B, H, N, 8] by positions [B, N]."""
    angle = positions.unsqueeze(1).unsqueeze(-1).to(x.dtype) * torch.tensor([1.0, 0.3, 0.1, 0.03])
    a, b = x.chunk(2, -1)
    turned = [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()]
    return torch.cat(turned, -1).to(x.dtype)


def with_padding(view: CacheView, left: int, right: int) -> CacheView:
    """Return the same sample with padding on both sides."""

    def around(t: Tensor) -> Tensor:
        return F.pad(t, (0, 0, left, right), value=30.0)

    total = left + view.seen + right
    tokens = torch.zeros(1, total, dtype=torch.bool)
    tokens[:, left : left + view.seen] = True
    return replace(
        view,
        keys=around(view.keys),
        values=around(view.values),
        hidden_states=around(view.hidden_states),
        slots=torch.arange(total).expand(1, view.keys.shape[1], -1),
        seen=total,
        tokens=tokens,
        real=tokens.expand(1, view.keys.shape[1], -1),
    )
