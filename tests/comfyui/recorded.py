"""Calls of `optimized_attention` by each model family, recorded as ComfyUI hands them to an
override.

They come from ComfyUI's own classes at tiny size, in 0.33.0 (783545f6) and 0.3.64 (63722199). One
record means that both agree. The prompt has 7 tokens, and a video 3 frames. The latents are 16 x 24
(8 x 12 for LTX-Video) in patches of 2 x 2. `test_engine.py` records them again.

Those of MiniMax H3 with references follow from the engine's source (01a56b76).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
        grid: (frames, rows, columns) of the image's tokens.
        attributes: of the model, what says how it cuts the latent into tokens.
        given: further arguments of the model's call; a tuple is the shape of a tensor, a list holds
            shapes of several.
    """

    model: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    latent: tuple[int, ...]
    start: int | None
    grid: tuple[int, int, int] = (1, 8, 12)
    attributes: dict[str, Any] = field(default_factory=lambda: {"patch_size": 2})
    given: dict[str, Any] = field(default_factory=dict)


def joint(
    model: str, length: int, start: int | None, *args: Any, kv_heads: int = 2, **kwargs: Any
) -> Recorded:
    """Heads first, an image of 8 x 12 tokens."""
    q, k = (2, 2, length, 32), (2, kv_heads, length, 32)
    return Recorded(model, q, k, k, (2, *args), HEADS_FIRST | kwargs, (2, 16, 16, 24), start)


def video(
    model: str,
    keys: int,
    start: int | None,
    *args: Any,
    queries: int = 288,
    attributes: dict[str, Any] | None = None,
    given: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Recorded:
    """Heads last, a video of 3 x 8 x 12 tokens."""
    q, k = (2, queries, 64), (2, keys, 64)
    attributes = attributes or {"patch_size": (1, 2, 2)}
    latent = (2, 16, 3, 16, 24)
    return Recorded(
        model, q, k, k, args, kwargs, latent, start, (3, 8, 12), attributes, given or {}
    )


def wan(
    keys: int,
    start: int | None,
    given: dict[str, Any],
    reference: bool = False,
    queries: int = 0,
    **kwargs: Any,
) -> Recorded:
    """Wan with something beside its video."""
    attributes = {"patch_size": (1, 2, 2), "ref_conv": reference or None}
    more: dict[str, Any] = {"queries": queries or keys, "attributes": attributes, "given": given}
    return video("WanModel", keys, start, **more, heads=2, **kwargs)


def heads_first(call: Recorded, *args: Any, **kwargs: Any) -> Recorded:
    """The same call with its heads first."""
    q, k, v = ((2, 2, shape[1], 32) for shape in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v, args=args, kwargs=HEADS_FIRST | kwargs)


PATCHIFIER = {"patchifier": type("Patchifier", (), {"patch_size": (1, 1, 1)})()}
Z_IMAGE = {
    "latent": (2, 16, 18, 26),
    "grid": (1, 9, 13),
    "attributes": {"patch_size": 2, "pad_tokens_multiple": 32},
}
OMNI = Z_IMAGE | {
    "attributes": Z_IMAGE["attributes"] | {"siglip_embedder": True},
    "given": {
        "ref_latents": [(1, 16, 8, 12)],
        "ref_contexts": [(1, 9, 24)],
        "siglip_feats": [(1, 4, 6, 24)],
    },
}
# Contexts as long as the image, 8 x 10, and what SigLIP sees of each longer than all else.
LONG = OMNI | {
    "latent": (2, 16, 16, 20),
    "grid": (1, 8, 10),
    "given": {
        "ref_latents": [(1, 16, 16, 20)] * 2,
        "ref_contexts": [(1, 90, 24)] * 2,
        "siglip_feats": [(1, 20, 20, 24)] * 2,
    },
}
WORDS = LONG | {"given": {"ref_contexts": [(1, 90, 24)] * 2}}
HUNYUAN: dict[str, Any] = {"patch_size": [1, 2, 2]}
COSMOS = {"patch_temporal": 1, "patch_spatial": 2}
KREA = {"patch": 2, "default_ref_method": "index"}
COG = {"patch_size": 2, "patch_size_t": None}
H3: dict[str, Any] = {
    "attributes": {"patch_size": (1, 2, 2)},
    "latent": (1, 1, 28288),
    "given": {"latent_shapes": ((1, 24, 3, 16, 24), (1, 32, 2, 10))},
    "grid": (3, 8, 12),
}
SOUND = {"latent_shapes": ((2, 16, 3, 8, 12), (2, 8, 10, 16))}
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
        given={"ref_latents": [(1, 16, 8, 12)]},
    ),
    "Chroma": joint("Chroma", 103, 7, mask=None),
    "Qwen-Image": joint("QwenImageTransformer2DModel", 103, 7, None),
    "Qwen-Image, a mask": joint("QwenImageTransformer2DModel", 103, 7, (2, 1, 103)),
    "Qwen-Image, 0.3.64": Recorded(
        "QwenImageTransformer2DModel", *((2, 103, 64),) * 3, (2, None), {}, (2, 16, 1, 16, 24), 7
    ),
    "SD3, text and image": Recorded(
        "OpenAISignatureMMDITWrapper",
        (2, 103, 128),
        (2, 103, 128),
        (2, 103, 2, 64),
        (),
        {"heads": 2},
        (2, 16, 16, 24),
        7,
    ),
    "SD3, image alone": Recorded(
        "OpenAISignatureMMDITWrapper",
        (2, 96, 128),
        (2, 96, 128),
        (2, 96, 2, 64),
        (),
        {"heads": 2},
        (2, 16, 16, 24),
        0,
    ),
    "AuraFlow": joint("MMDiT", 111, 15),  # 8 register tokens before the prompt's
    "Lumina 2": joint("NextDiT", 103, 7, None),
    "Lumina 2, noise refiner": joint("NextDiT", 96, 0, None),
    "Lumina 2, prompt": joint("NextDiT", 7, None, None),
    "Lumina 2, noise refiner, 0.3.64": joint("NextDiT", 96, None, (2, 1, 96)),
    # Prompts and images are padded to multiples of 32 tokens: here 32, and 117 of the image to 128.
    "Z-Image": replace(joint("NextDiT", 160, 32, None), **Z_IMAGE),
    "Z-Image, noise refiner": replace(joint("NextDiT", 128, 0, None), **Z_IMAGE),
    "Z-Image, prompt": replace(joint("NextDiT", 32, None, None), **Z_IMAGE),
    # Two prompts, what the vision encoder saw, the reference, the image.
    "Z-Image Omni, a reference": replace(joint("NextDiT", 288, 160, None), **OMNI),
    "Z-Image Omni, its refiners": replace(joint("NextDiT", 160, None, None), **OMNI),
    "Z-Image Omni, both prompts": replace(joint("NextDiT", 64, None, None), **OMNI),
    **{
        f"Z-Image Omni, long contexts, {name}": replace(joint("NextDiT", length, start, None), **of)
        for name, length, start, of in (
            ("all", 224 + 864 + 192 + 96, 1280, LONG),
            ("the prompts' refiner", 224, None, LONG),
            ("SigLIP's refiner", 864, None, LONG),
            ("the images' refiner", 288, None, LONG),
            ("no reference", 224 + 96, 224, WORDS),
            ("no reference, the prompts' refiner", 224, None, WORDS),
        )
    },
    # Text, references and sound, then the video.
    **{
        f"MiniMax H3, {name}": replace(
            joint("MiniMaxH3Model", length, start, mask=None),
            **dict.fromkeys("qkv", (1, 2, length, 32)),
            **H3,
        )
        for name, length, start in (
            ("text and sound", 7 + 20 + 288, 27),
            ("references", 7 + 116 + 20 + 288, 143),
            ("the prompt's own", 7, None),
        )
    },
    "Wan": video("WanModel", 288, 0, heads=2),
    "Wan, prompt": video("WanModel", 7, None, heads=2),
    "LTX-Video": Recorded(
        "LTXVModel",
        *((2, 288, 64),) * 3,
        (2,),
        {"attn_precision": None},
        (2, 16, 3, 8, 12),
        0,
        (3, 8, 12),
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
        (3, 8, 12),
        PATCHIFIER,
    ),
    "HunyuanVideo": Recorded(
        "HunyuanVideo",
        *((2, 2, 295, 32),) * 3,
        (2,),
        HEADS_FIRST | {"mask": None},
        (2, 16, 3, 16, 24),
        7,
        (3, 8, 12),
        HUNYUAN,
    ),
    "HunyuanVideo, prompt": Recorded(
        "HunyuanVideo",
        *((2, 2, 7, 32),) * 3,
        (2,),
        HEADS_FIRST | {"mask": None},
        (2, 16, 3, 16, 24),
        None,
        (3, 8, 12),
        HUNYUAN,
    ),
    "Qwen-Image Layered": heads_first(
        video("QwenImageTransformer2DModel", 295, 7, queries=295, attributes={"patch_size": 2}),
        2,
        None,
    ),
    "HunyuanVideo 1.5": heads_first(  # 5 tokens of a vision encoder before the prompt's
        video("HunyuanVideo", 300, 12, queries=300, attributes=HUNYUAN), 2, mask=None
    ),
    "HunyuanImage 2.1": replace(  # 3 of a byte encoder behind the prompt's
        joint("HunyuanVideo", 106, 10, mask=None),
        latent=(2, 16, 8, 12),
        attributes={"patch_size": [1, 1]},
    ),
    "Krea 2": replace(joint("SingleStreamDiT", 103, 7, mask=None), attributes=KREA),
    "Krea 2, a reference": replace(
        joint("SingleStreamDiT", 127, 7, mask=None),
        attributes=KREA,
        given={"ref_latents": [(1, 16, 8, 12)]},
    ),
    **{
        f"Krea 2, prompt of {batch}": replace(
            joint("SingleStreamDiT", length, None, mask=None),
            **dict.fromkeys("qkv", (batch, 2, length, 12)),
            attributes=KREA,
        )
        for batch, length in ((14, 2), (2, 7))  # over its layers, over its tokens
    },
    "Ideogram 4": replace(
        joint("Ideogram4Transformer2DModel", 103, 7, None), latent=(2, 128, 8, 12), attributes={}
    ),
    "Ideogram 4, a mask": replace(
        joint("Ideogram4Transformer2DModel", 103, 7, (2, 1, 103, 103)),
        latent=(2, 128, 8, 12),
        attributes={},
    ),
    "ERNIE-Image": replace(  # as the node hands it on
        joint("ErnieImageModel", 103, 0),
        **dict.fromkeys("qkv", (2, 103, 64)),
        kwargs={"mask": None},
        attributes={"patch_size": 2, "layers": ()},
    ),
    "HiDream": replace(
        joint("HiDreamImageTransformer2DModel", 103, 0),
        **dict.fromkeys("qkv", (2, 103, 64)),
        kwargs={},
    ),
    "OmniGen 2": joint("OmniGen2Transformer2DModel", 103, 7, None, kv_heads=1, enable_gqa=True),
    "OmniGen 2, noise refiner": joint(
        "OmniGen2Transformer2DModel", 96, 0, None, kv_heads=1, enable_gqa=True
    ),
    "OmniGen 2, prompt": joint(
        "OmniGen2Transformer2DModel", 7, None, None, kv_heads=1, enable_gqa=True
    ),
    "OmniGen 2, a reference": replace(
        joint("OmniGen2Transformer2DModel", 203, 107, None, kv_heads=1, enable_gqa=True),
        given={"ref_latents": [(1, 16, 20, 20)]},
    ),
    "OmniGen 2, the reference's refiner": replace(
        joint("OmniGen2Transformer2DModel", 100, None, None, kv_heads=1, enable_gqa=True),
        given={"ref_latents": [(1, 16, 20, 20)]},
    ),
    "Kandinsky 5": heads_first(video("Kandinsky5", 288, 0), heads=2),
    "Kandinsky 5, prompt": heads_first(video("Kandinsky5", 7, None), heads=2),
    "Kandinsky 5, the prompt's own": heads_first(video("Kandinsky5", 7, None, queries=7), heads=2),
    "Cosmos": heads_first(
        video("GeneralDIT", 288, 0, attributes=COSMOS), 2, mask=None, skip_output_reshape=True
    ),
    "Cosmos, prompt": heads_first(
        video("GeneralDIT", 7, None, attributes=COSMOS), 2, mask=None, skip_output_reshape=True
    ),
    "Cosmos Predict2": heads_first(video("MiniTrainDIT", 288, 0, attributes=COSMOS), 2),
    "Cosmos Predict2, prompt": heads_first(video("MiniTrainDIT", 7, None, attributes=COSMOS), 2),
    "Anima": replace(joint("MiniTrainDIT", 96, 0), attributes=COSMOS, latent=(2, 16, 1, 16, 24)),
    "Anima, prompt": replace(
        joint("MiniTrainDIT", 7, None),
        q=(2, 2, 96, 32),
        attributes=COSMOS,
        latent=(2, 16, 1, 16, 24),
    ),
    "Mochi": heads_first(
        video("AsymmDiTJoint", 293, 0, queries=293, attributes={"patch_size": 2}), 2
    ),
    "CogVideoX": video("CogVideoXTransformer3DModel", 295, 7, queries=295, attributes=COG, heads=2),
    "LTX-2": replace(
        video("LTXAVModel", 288, 0, 2, attributes=PATCHIFIER, given=SOUND, attn_precision=None),
        latent=(2, 1, 5888),
    ),
    **{
        f"LTX-2, {name}": replace(
            video("LTXAVModel", 288, None, 2, attributes=PATCHIFIER, given=SOUND),
            q=(2, queries, width),
            k=(2, keys, width),
            v=(2, keys, width),
            kwargs={"attn_precision": None},
            latent=(2, 1, 5888),
        )
        for name, queries, keys, width in (
            ("prompt", 288, 7, 64),
            ("sound", 10, 10, 32),
            ("the sound's prompt", 10, 7, 32),
            ("from sound to video", 288, 10, 32),
            ("from video to sound", 10, 288, 32),
        )
    },
    "Wan, a reference frame": wan(384, 96, {"reference_latent": (2, 16, 16, 24)}, True),
    **{
        f"Wan, {number} tokens, {name}": wan(7, None, {}, queries=number, **low)
        for number in (288, 312, 384, 456, 480)
        for name, low in (("prompt", {}), ("image prompt", {"low_precision_attention": False}))
    },
    "Wan, frames behind": wan(384, 0, {"time_dim_concat": (2, 16, 1, 16, 24)}),
    "Wan, context latents": wan(312, 0, {"context_latents": [(2, 16, 1, 8, 12)]}),
    "Wan SCAIL": wan(
        456, 96, {"reference_latent": (2, 16, 1, 16, 24), "pose_latents": (2, 16, 3, 8, 12)}, True
    ),
    "Wan SCAIL 2": wan(480, 192, {"reference_latent": (2, 16, 2, 16, 24)}, True),
}
