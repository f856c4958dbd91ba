"""Calls of `optimized_attention` by each model family, recorded as ComfyUI passes them on.

They come from ComfyUI's own classes at tiny size, in 0.33.0 (783545f6) and 0.3.64 (63722199). One
record means that both agree. The prompt has 7 tokens, and a video 3 frames. The latents are 16 x 24
(8 x 12 for LTX-Video) in patches of 2 x 2. `test_engine.py` records them again.

Those of MiniMax H3 with references follow from the engine's source (01a56b76).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Recorded:
    """One call; a tuple among its arguments is the shape of a tensor, a list holds several."""

    model: str  # the family's class in ComfyUI
    q: Shape
    k: Shape  # without it in the file, that of q
    v: Shape  # without it in the file, that of k
    latent: Shape
    start: int | None = None  # of the image in the sequence; None if attention is not the image's
    args: tuple[Any, ...] = ()  # those after q, k and v by position
    kwargs: dict[str, Any] = field(default_factory=dict)  # but for transformer_options
    grid: tuple[int, int, int] = (1, 8, 12)  # frames, rows, columns of the image's tokens
    attributes: dict[str, Any] = field(default_factory=lambda: {"patch_size": 2})  # of the model
    given: dict[str, Any] = field(default_factory=dict)  # further arguments of the model's call


def _read(value: Any, name: str = "") -> Any:
    """Return a JSON value with tuples for lists, except lists of several shapes."""
    if isinstance(value, dict):
        values = {key: _read(one, key) for key, one in value.items()}
        return SimpleNamespace(**values) if name == "patchifier" else values
    if isinstance(value, list):
        several = bool(value) and all(isinstance(one, list) for one in value)
        return [_read(one) for one in value] if several else tuple(map(_read, value))
    return value


def _recorded(model: str, q: Shape, latent: Shape, **more: Any) -> Recorded:
    k = more.pop("k", q)
    return Recorded(model, q, k, more.pop("v", k), latent, **more)


CALLS = {
    name: _recorded(**_read(row))
    for name, row in json.loads(
        Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    ).items()
}
