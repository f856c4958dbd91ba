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
    """One call.

    Attributes:
        model: the family's class in ComfyUI.
        q, k, v: shapes of the first three arguments; without v, that of k, without k, that of q.
        latent: shape of the model's latents.
        start: where the image begins in the sequence; None: this attention is not the image's.
        args: those that follow by position; a tuple is the shape of a mask.
        kwargs: those by keyword, but for transformer_options.
        grid: (frames, rows, columns) of the image's tokens.
        attributes: of the model, what says how it cuts the latent into tokens.
        given: further arguments of the model's call; a tuple is the shape of a tensor, a list holds
            shapes of several.
    """

    model: str
    q: Shape
    k: Shape
    v: Shape
    latent: Shape
    start: int | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    grid: tuple[int, int, int] = (1, 8, 12)
    attributes: dict[str, Any] = field(default_factory=lambda: {"patch_size": 2})
    given: dict[str, Any] = field(default_factory=dict)


def _read(value: Any, name: str = "") -> Any:
    """Return a JSON value with tuples for lists, except lists of several shapes.

    Objects of a model become its parts.
    """
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
