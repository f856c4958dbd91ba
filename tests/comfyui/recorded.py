"""Calls of `optimized_attention` by each model family, as ComfyUI hands them to an override: what
was seen, written down.

Seen with models of ComfyUI's own classes at tiny size, in ComfyUI 0.33.0 (commit 783545f6) and
0.3.64 (63722199); the same in both where one is given. A prompt of 7 tokens, latents of 16 x 24 (8
x 12 for LTX-Video) in patches of 2 x 2, 3 frames for videos. `test_engine.py` records them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

HEADS_FIRST = {"skip_reshape": True}


@dataclass(frozen=True)
class Recorded:
    """One call.

    Attributes:
        model: the family's class in ComfyUI.
        q, k, v: shapes of the first three arguments.
        args: those that follow by position; a tuple is the shape of a mask.
        kwargs: those by keyword, but for transformer_options.
        latent: shape of the model's latents.
        start: where the image begins in the sequence; None: this attention is not the image's.
        attributes: of the model, what says how it cuts the latent into tokens.
    """

    model: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    latent: tuple[int, ...]
    start: int | None
    attributes: dict[str, Any] = field(default_factory=lambda: {"patch_size": 2})
    references: tuple[tuple[int, ...], ...] = ()


def joint(model: str, length: int, start: int | None, *args: Any, **kwargs: Any) -> Recorded:
    """Heads first, an image of 8 x 12 tokens."""
    shape = (2, 2, length, 32)
    return Recorded(
        model, shape, shape, shape, (2, *args), HEADS_FIRST | kwargs, (2, 16, 16, 24), start
    )


def video(model: str, keys: int, start: int | None, *args: Any, **kwargs: Any) -> Recorded:
    """Heads last, a video of 3 x 8 x 12 tokens."""
    q, k = (2, 288, 64), (2, keys, 64)
    attributes: dict[str, Any] = {"patch_size": (1, 2, 2)}
    return Recorded(model, q, k, k, args, kwargs, (2, 16, 3, 16, 24), start, attributes)


PATCHIFIER = {"patchifier": type("Patchifier", (), {"patch_size": (1, 1, 1)})()}
HUNYUAN: dict[str, Any] = {"patch_size": [1, 2, 2]}
CALLS = {
    "Flux": joint("Flux", 103, 7, mask=None),
    "Flux, a mask": joint("Flux", 103, 7, mask=(2, 1, 103)),
    "Flux, Kontext": Recorded(
        "Flux",
        *((2, 2, 127, 32),) * 3,
        (2,),
        HEADS_FIRST | {"mask": None},
        (2, 16, 16, 24),
        7,
        references=((1, 16, 8, 12),),
    ),
    "Chroma": joint("Chroma", 103, 7, mask=None),
    "Qwen-Image": joint("QwenImageTransformer2DModel", 103, 7, None),
    "Qwen-Image, a mask": joint("QwenImageTransformer2DModel", 103, 7, (2, 1, 103)),
    "Qwen-Image, 0.3.64": Recorded(
        "QwenImageTransformer2DModel", *((2, 103, 64),) * 3, (2, None), {}, (2, 16, 1, 16, 24), 7
    ),
    "SD3, text and image": Recorded(
        "MMDiT", (2, 103, 128), (2, 103, 128), (2, 103, 2, 64), (), {"heads": 2}, (2, 16, 16, 24), 7
    ),
    "SD3, image alone": Recorded(
        "MMDiT", (2, 96, 128), (2, 96, 128), (2, 96, 2, 64), (), {"heads": 2}, (2, 16, 16, 24), 0
    ),
    "AuraFlow": joint("MMDiT", 111, 15),  # 8 register tokens before the prompt's
    "Lumina 2": joint("NextDiT", 103, 7, None),
    "Lumina 2, noise refiner": joint("NextDiT", 96, 0, None),
    "Lumina 2, prompt": joint("NextDiT", 7, None, None),
    "Lumina 2, noise refiner, 0.3.64": joint("NextDiT", 96, None, (2, 1, 96)),
    "Wan": video("WanModel", 288, 0, heads=2),
    "Wan, prompt": video("WanModel", 7, None, heads=2),
    "LTX-Video": Recorded(
        "LTXVModel",
        *((2, 288, 64),) * 3,
        (2,),
        {"attn_precision": None},
        (2, 16, 3, 8, 12),
        0,
        PATCHIFIER,
    ),
    "LTX-Video, prompt": Recorded(
        "LTXVModel",
        (2, 288, 64),
        *((2, 7, 64),) * 2,
        (2,),
        {"attn_precision": None},
        (2, 16, 3, 8, 12),
        None,
        PATCHIFIER,
    ),
    "HunyuanVideo": Recorded(
        "HunyuanVideo",
        *((2, 2, 295, 32),) * 3,
        (2,),
        HEADS_FIRST | {"mask": None},
        (2, 16, 3, 16, 24),
        7,
        HUNYUAN,
    ),
    "HunyuanVideo, prompt": Recorded(
        "HunyuanVideo",
        *((2, 2, 7, 32),) * 3,
        (2,),
        HEADS_FIRST | {"mask": None},
        (2, 16, 3, 16, 24),
        None,
        HUNYUAN,
    ),
}
