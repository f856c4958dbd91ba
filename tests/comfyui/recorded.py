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
    **kwargs: Any,
) -> Recorded:
    """Heads last, a video of 3 x 8 x 12 tokens."""
    q, k = (2, queries, 64), (2, keys, 64)
    attributes = attributes or {"patch_size": (1, 2, 2)}
    latent = (2, 16, 3, 16, 24)
    return Recorded(model, q, k, k, args, kwargs, latent, start, (3, 8, 12), attributes)


def wan(
    keys: int, start: int | None, reference: bool = False, queries: int = 0, **given: Any
) -> Recorded:
    """Wan with something beside its video."""
    attributes = {"patch_size": (1, 2, 2), "ref_conv": reference or None}
    call = video("WanModel", keys, start, queries=queries or keys, attributes=attributes, heads=2)
    return replace(call, given=given)


def heads_first(call: Recorded, *args: Any, **kwargs: Any) -> Recorded:
    """The same call with its heads first."""
    q, k, v = ((2, 2, shape[1], 32) for shape in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v, args=args, kwargs=HEADS_FIRST | kwargs)


PATCHIFIER = {"patchifier": type("Patchifier", (), {"patch_size": (1, 1, 1)})()}
PADDED: dict[str, Any] = {"patch_size": 2, "pad_tokens_multiple": 32}
SEES = PADDED | {"siglip_embedder": True}
HUNYUAN: dict[str, Any] = {"patch_size": [1, 2, 2]}
COSMOS = {"patch_temporal": 1, "patch_spatial": 2}
KREA = {"patch": 2, "default_ref_method": "index"}
COG = {"patch_size": 2, "patch_size_t": None}
SOUND = {"latent_shapes": ((2, 16, 3, 8, 12), (2, 8, 10, 16))}
ONE_REFERENCE = {"ref_latents": [(1, 16, 8, 12)]}
LARGE_REFERENCE = {"ref_latents": [(1, 16, 20, 20)]}


def z_image(length: int, start: int | None) -> Recorded:
    """Prompts and images are padded to multiples of 32 tokens: here 32, and 117 of the image to
    128.
    """
    call = joint("NextDiT", length, start, None)
    return replace(call, latent=(2, 16, 18, 26), grid=(1, 9, 13), attributes=PADDED)


def omni(length: int, start: int | None) -> Recorded:
    """Two prompts, what the vision encoder saw, the reference, the image."""
    given = ONE_REFERENCE | {"ref_contexts": [(1, 9, 24)], "siglip_feats": [(1, 4, 6, 24)]}
    return replace(z_image(length, start), attributes=SEES, given=given)


def omni_long(length: int, start: int | None, references: bool = True) -> Recorded:
    """Contexts as long as the image, 8 x 10, and what SigLIP sees of each longer than all else."""
    given: dict[str, Any] = {"ref_contexts": [(1, 90, 24)] * 2}
    if references:
        given |= {"ref_latents": [(1, 16, 16, 20)] * 2, "siglip_feats": [(1, 20, 20, 24)] * 2}
    call = replace(z_image(length, start), attributes=SEES, given=given)
    return replace(call, latent=(2, 16, 16, 20), grid=(1, 8, 10))


def h3(length: int, start: int | None) -> Recorded:
    """MiniMax H3: text, references and sound, then the video."""
    call = video("MiniMaxH3Model", length, start, queries=length)
    call = heads_first(replace(call, latent=(1, 1, 28288)), 2, mask=None)
    given = {"latent_shapes": ((1, 24, 3, 16, 24), (1, 32, 2, 10))}
    return replace(call, **dict.fromkeys("qkv", (1, 2, length, 32)), given=given)


def omnigen(length: int, start: int | None, **given: Any) -> Recorded:
    """OmniGen 2, with half as many heads of keys."""
    call = joint("OmniGen2Transformer2DModel", length, start, None, kv_heads=1, enable_gqa=True)
    return replace(call, given=given)


def sd3(length: int, start: int) -> Recorded:
    call = replace(
        joint("OpenAISignatureMMDITWrapper", length, start), args=(), kwargs={"heads": 2}
    )
    return replace(call, q=(2, length, 128), k=(2, length, 128), v=(2, length, 2, 64))


def ltx2(queries: int, keys: int, width: int, start: int | None = None) -> Recorded:
    """LTX-2, a video and its sound in one latent."""
    call = video(
        "LTXAVModel", keys, start, 2, queries=queries, attributes=PATCHIFIER, attn_precision=None
    )
    widths = {"q": (2, queries, width), "k": (2, keys, width), "v": (2, keys, width)}
    return replace(call, **widths, latent=(2, 1, 5888), given=SOUND)


def krea(length: int, start: int | None, **given: Any) -> Recorded:
    return replace(joint("SingleStreamDiT", length, start, mask=None), attributes=KREA, given=given)


def krea_prompt(batch: int, length: int) -> Recorded:
    return replace(krea(length, None), **dict.fromkeys("qkv", (batch, 2, length, 12)))


def ltx(keys: int, start: int | None) -> Recorded:
    call = video("LTXVModel", keys, start, 2, attributes=PATCHIFIER, attn_precision=None)
    return replace(call, latent=(2, 16, 3, 8, 12))


def cosmos(keys: int, start: int | None) -> Recorded:
    call = video("GeneralDIT", keys, start, attributes=COSMOS)
    return heads_first(call, 2, mask=None, skip_output_reshape=True)


def predict2(keys: int, start: int | None, **changes: Any) -> Recorded:
    return heads_first(video("MiniTrainDIT", keys, start, attributes=COSMOS, **changes), 2)


def anima(keys: int, start: int | None) -> Recorded:
    """One frame."""
    return replace(predict2(keys, start, queries=96), latent=(2, 16, 1, 16, 24), grid=(1, 8, 12))


def hunyuan(length: int, start: int | None) -> Recorded:
    call = video("HunyuanVideo", length, start, queries=length, attributes=HUNYUAN)
    return heads_first(call, 2, mask=None)


def ideogram(*args: Any) -> Recorded:
    call = joint("Ideogram4Transformer2DModel", 103, 7, *args)
    return replace(call, latent=(2, 128, 8, 12), attributes={})


def kandinsky(keys: int, start: int | None, queries: int = 288) -> Recorded:
    return heads_first(video("Kandinsky5", keys, start, queries=queries), heads=2)


def heads_last(call: Recorded, **kwargs: Any) -> Recorded:
    """The same call of an image with its heads last."""
    return replace(call, **dict.fromkeys("qkv", (2, call.q[2], 64)), kwargs=kwargs)


QWEN, QWEN_REFERENCE = "QwenImageTransformer2DModel", {"ref_latents": [(1, 16, 1, 8, 12)]}
# The image, unless it is said, behind 7 tokens of the prompt.
CALLS = {
    "Flux": joint("Flux", 103, 7, mask=None),
    "Flux, a mask": joint("Flux", 103, 7, mask=(2, 1, 103)),
    "Flux, Kontext": replace(joint("Flux", 127, 7, mask=None), given=ONE_REFERENCE),
    "Chroma": joint("Chroma", 103, 7, mask=None),
    "Qwen-Image": joint(QWEN, 103, 7, None),
    "Qwen-Image, a mask": joint(QWEN, 103, 7, (2, 1, 103)),
    "Qwen-Image, a reference": replace(joint(QWEN, 127, 7, None), given=QWEN_REFERENCE),
    "Qwen-Image, 0.3.64": replace(heads_last(joint(QWEN, 103, 7, None)), latent=(2, 16, 1, 16, 24)),
    "Qwen-Image, 0.3.64, a reference": replace(
        heads_last(joint(QWEN, 127, 7, None)), latent=(2, 16, 1, 16, 24), given=QWEN_REFERENCE
    ),
    "SD3, text and image": sd3(103, 7),
    "SD3, image alone": sd3(96, 0),
    "AuraFlow": joint("MMDiT", 111, 15),  # 8 register tokens before the prompt's
    "Lumina 2": joint("NextDiT", 103, 7, None),
    "Lumina 2, noise refiner": joint("NextDiT", 96, 0, None),
    "Lumina 2, prompt": joint("NextDiT", 7, None, None),
    "Lumina 2, noise refiner, 0.3.64": joint("NextDiT", 96, None, (2, 1, 96)),
    "Z-Image": z_image(160, 32),
    "Z-Image, noise refiner": z_image(128, 0),
    "Z-Image, prompt": z_image(32, None),
    "Z-Image Omni, a reference": omni(288, 160),
    "Z-Image Omni, its refiners": omni(160, None),
    "Z-Image Omni, both prompts": omni(64, None),
    "Z-Image Omni, long contexts, all": omni_long(224 + 864 + 192 + 96, 1280),
    "Z-Image Omni, long contexts, the prompts' refiner": omni_long(224, None),
    "Z-Image Omni, long contexts, SigLIP's refiner": omni_long(864, None),
    "Z-Image Omni, long contexts, the images' refiner": omni_long(288, None),
    "Z-Image Omni, long contexts, no reference": omni_long(224 + 96, 224, False),
    "Z-Image Omni, long contexts, no reference, the prompts' refiner": omni_long(224, None, False),
    "MiniMax H3, text and sound": h3(7 + 20 + 288, 27),
    "MiniMax H3, references": h3(7 + 116 + 20 + 288, 143),
    "MiniMax H3, the prompt's own": h3(7, None),
    "Wan": video("WanModel", 288, 0, heads=2),
    "Wan, prompt": video("WanModel", 7, None, heads=2),
    "LTX-Video": ltx(288, 0),
    "LTX-Video, prompt": ltx(7, None),
    "HunyuanVideo": hunyuan(295, 7),
    "HunyuanVideo, prompt": hunyuan(7, None),
    "HunyuanVideo 1.5": hunyuan(300, 12),  # 5 tokens of a vision encoder before the prompt's
    "HunyuanImage 2.1": replace(  # 3 of a byte encoder behind the prompt's
        joint("HunyuanVideo", 106, 10, mask=None),
        latent=(2, 16, 8, 12),
        attributes={"patch_size": [1, 1]},
    ),
    "Qwen-Image Layered": heads_first(
        video(QWEN, 295, 7, queries=295, attributes={"patch_size": 2}), 2, None
    ),
    "Krea 2": krea(103, 7),
    "Krea 2, a reference": krea(127, 7, **ONE_REFERENCE),
    "Krea 2, prompt over its layers": krea_prompt(14, 2),
    "Krea 2, prompt over its tokens": krea_prompt(2, 7),
    "Ideogram 4": ideogram(None),
    "Ideogram 4, a mask": ideogram((2, 1, 103, 103)),
    "ERNIE-Image": replace(  # as the node hands it on
        heads_last(joint("ErnieImageModel", 103, 0), mask=None),
        attributes={"patch_size": 2, "layers": ()},
    ),
    "HiDream": heads_last(joint("HiDreamImageTransformer2DModel", 103, 0)),
    "OmniGen 2": omnigen(103, 7),
    "OmniGen 2, noise refiner": omnigen(96, 0),
    "OmniGen 2, prompt": omnigen(7, None),
    "OmniGen 2, a reference": omnigen(203, 107, **LARGE_REFERENCE),
    "OmniGen 2, the reference's refiner": omnigen(100, None, **LARGE_REFERENCE),
    "Kandinsky 5": kandinsky(288, 0),
    "Kandinsky 5, prompt": kandinsky(7, None),
    "Kandinsky 5, the prompt's own": kandinsky(7, None, queries=7),
    "Cosmos": cosmos(288, 0),
    "Cosmos, prompt": cosmos(7, None),
    "Cosmos Predict2": predict2(288, 0),
    "Cosmos Predict2, prompt": predict2(7, None),
    "Anima": anima(96, 0),
    "Anima, prompt": anima(7, None),
    "Mochi": heads_first(
        video("AsymmDiTJoint", 293, 0, queries=293, attributes={"patch_size": 2}), 2
    ),
    "CogVideoX": video("CogVideoXTransformer3DModel", 295, 7, queries=295, attributes=COG, heads=2),
    "LTX-2": ltx2(288, 288, 64, 0),
    "LTX-2, prompt": ltx2(288, 7, 64),
    "LTX-2, sound": ltx2(10, 10, 32),
    "LTX-2, the sound's prompt": ltx2(10, 7, 32),
    "LTX-2, from sound to video": ltx2(288, 10, 32),
    "LTX-2, from video to sound": ltx2(10, 288, 32),
    "Wan, a reference frame": wan(384, 96, True, reference_latent=(2, 16, 16, 24)),
    **{
        f"Wan, {number} tokens, {name}": replace(
            wan(7, None, queries=number), kwargs={"heads": 2, **low}
        )
        for number in (288, 312, 384, 456, 480)
        for name, low in (("prompt", {}), ("image prompt", {"low_precision_attention": False}))
    },
    "Wan, frames behind": wan(384, 0, time_dim_concat=(2, 16, 1, 16, 24)),
    "Wan, context latents": wan(312, 0, context_latents=[(2, 16, 1, 8, 12)]),
    "Wan SCAIL": wan(
        456, 96, True, reference_latent=(2, 16, 1, 16, 24), pose_latents=(2, 16, 3, 8, 12)
    ),
    "Wan SCAIL 2": wan(480, 192, True, reference_latent=(2, 16, 2, 16, 24)),
}
