"""List the families of diffusers' transformers.

A row of the table reads: name, classes of the model, classes of the attention, layout of the image,
arguments with a row per token. Classes of the attention have the last part of their path.
"""

from __future__ import annotations

from torch import nn

from mame_sd.diffusion.context import Call, Tokens
from mame_sd.diffusion.families import layouts as at
from mame_sd.diffusion.families.family import REGISTERED, Family, class_names
from mame_sd.diffusion.families.layouts import along

# Arguments of processors that receive the same tokens for queries and keys.
QUERY_AND_KEY = ("hidden_states", "encoder_hidden_states")
# (cos, sin), each [L, D], or one tensor [2, L, D] of both.
ROTARY = along(image_rotary_emb=-2)
MASKED = along(image_rotary_emb=-2, attention_mask=(-2, -1))


def _from_cache(call: Call) -> bool:
    """Return True if keys of the prompt and of reference images come from an earlier call.

    This reads the arguments of Qwen-Image 2.1, Flux 2 and Sana-WM.
    """
    return call.get("kv_cache_mode") in ("cached", "inject", "inject_and_capture_post_rope")


def _from_object(call: Call) -> bool:
    """Return True if GLM-Image reads keys from its cache, by the cache's own mode."""
    return getattr(call.get("kv_cache"), "mode", None) == "read"


def _text_or_its_cache(call: Call, tokens: Tokens) -> int:
    """Return the number of the text's keys, which may be of an earlier call (TextKVCache)."""
    text = call.get("encoder_hidden_states")
    kept = call.get("cached_txt_key") if text is None else text
    return 0 if kept is None else int(kept.shape[1])


def _of_each_sample(call: Call, tokens: Tokens) -> None:
    """Return None: Mochi's attention runs over one sample at a time, each with its own text."""


def _next_to_image(call: Call, tokens: Tokens) -> int:
    """Return the number of the text's keys, in a sequence that holds the image's tokens too."""
    return int(call["encoder_hidden_states"].shape[1]) - tokens.count


# fmt: off
BUILT_IN = (
    # Text is in the same call as the image, or there is none.
    Family("HunyuanDiT", ("HunyuanDiT2DModel", "HunyuanDiT2DControlNetModel"), ("Attention.attn1",),
           at.patches, ROTARY),
    Family("Lumina", ("LuminaNextDiT2DModel",), ("Attention.attn1",), at.patches,
           along(query_rotary_emb=1, key_rotary_emb=1, attention_mask=1),
           inputs=QUERY_AND_KEY, mask=True),
    Family("Lumina 2", ("Lumina2Transformer2DModel",), ("Attention.attn",), at.lumina2,
           along(image_rotary_emb=1, attention_mask=1), inputs=QUERY_AND_KEY,
           outside=("context_refiner",), mask=True, eager=True),
    Family("OmniGen", ("OmniGenTransformer2DModel",), ("Attention.self_attn",),
           at.in_sequence(at.patches, before=None), MASKED, inputs=QUERY_AND_KEY, mask=True),
    Family("Stable Diffusion 3", ("SD3Transformer2DModel", "SD3ControlNetModel"),
           ("Attention.attn", "Attention.attn2"), at.patches, joint="last", parallel=True,
           equal_text=True),
    Family("AuraFlow", ("AuraFlowTransformer2DModel",), ("Attention.attn",), at.aura_flow,
           joint="first"),
    # Flux and similar models: positions of the image's tokens are in `img_ids`.
    Family("Flux", ("FluxTransformer2DModel", "FluxControlNetModel"), ("FluxAttention",), at.packed,
           ROTARY, outputs=(0, 2), eager=True, references=True, joint="first"),
    Family("Chroma", ("ChromaTransformer2DModel",), ("FluxAttention",), at.packed, MASKED,
           mask=True, eager=True, joint="first"),
    Family("Flux 2", ("Flux2Transformer2DModel",), ("Flux2Attention", "Flux2ParallelSelfAttention"),
           at.packed, ROTARY, eager=True, cached=_from_cache, references=True, joint="first"),
    Family("Flux 3", ("Flux3Transformer2DModel",), ("Flux3Attention",), at.packed, ROTARY,
           outside=("txt_mode_blocks", "image_cond"), eager=True),
    Family("Bria", ("BriaTransformer2DModel", "BriaFiboTransformer2DModel"),
           ("BriaAttention", "BriaFiboAttention", "Attention.attn"), at.packed, MASKED, mask=True,
           eager=True, references=True, joint="first"),
    Family("Ovis-Image", ("OvisImageTransformer2DModel",), ("OvisImageAttention",), at.packed,
           ROTARY, eager=True, joint="first"),
    Family("LongCat-Image", ("LongCatImageTransformer2DModel",), ("LongCatImageAttention",),
           at.packed, ROTARY, eager=True, references=True, joint="first"),
    # Joint attention with the text's keys first.
    Family("Qwen-Image", ("QwenImageTransformer2DModel", "QwenImageControlNetModel"),
           ("Attention.attn",), at.qwen_image,
           along(image_rotary_emb=[0, None], attention_mask=-1),  # masks: before diffusers 0.38
           mask=True, references=True, joint="first"),
    Family("CogView 3+", ("CogView3PlusTransformer2DModel",), ("Attention.attn1",), at.patches,
           joint="first"),
    Family("CogView 4", ("CogView4Transformer2DModel",), ("Attention.attn1",), at.patches, ROTARY,
           mask=True, joint="first", shared_mlp=True),
    Family("GLM-Image", ("GlmImageTransformer2DModel",), ("Attention.attn1",), at.patches, ROTARY,
           mask=True, cached=_from_object, joint="first", shared_mlp=True),
    Family("CogVideoX", ("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel"),
           ("Attention.attn1",), at.sides_at(1, 3, 4), ROTARY, joint="first"),
    Family("EasyAnimate", ("EasyAnimateTransformer3DModel",), ("Attention.attn1",),
           at.patches, ROTARY, joint="first", shared_mlp=True),
    Family("PRX", ("PRXTransformer2DModel",), ("PRXAttention.attention",), at.patches,
           along(image_rotary_emb=2), mask=True, joint="first"),
    # Joint attention with the text's keys last.
    Family("HunyuanVideo", ("HunyuanVideoTransformer3DModel",), ("Attention.attn",),
           at.in_sequence(at.patches, after=None), MASKED, outside=("context_embedder",),
           mask=True, joint="last"),
    Family("FramePack", ("HunyuanVideoFramepackTransformer3DModel",), ("Attention.attn",),
           at.in_sequence(at.patches, before=None), ROTARY, outside=("context_embedder",),
           # the mask counts history and text too
           mask=True, queries=False, joint="last",
           blocks="its single-stream blocks put text after the image and history before it"),
    Family("HunyuanVideo 1.5", ("HunyuanVideo15Transformer3DModel",), ("Attention.attn",),
           at.patches, ROTARY, outside=("context_embedder",), mask=True, joint="last"),
    Family("HunyuanImage", ("HunyuanImageTransformer2DModel",), ("Attention.attn",),
           at.in_sequence(at.patches, after=None), MASKED, outside=("context_embedder",),
           mask=True, joint="last"),
    Family("Motif Video", ("MotifVideoTransformer3DModel",), ("MotifVideoAttention.attn",),
           at.in_sequence(at.patches, after=None), MASKED, mask=True, joint="last"),
    Family("Mochi", ("MochiTransformer3DModel",), ("MochiAttention.attn1",), at.patches,
           along(image_rotary_emb=0), mask=True, joint="last",
           text_keys=_of_each_sample),
    Family("JoyImage", ("JoyImageEditTransformer3DModel",), ("JoyImageAttention.attn",),
           at.joyimage, along(image_rotary_emb=[0, None]), references=True, joint="last"),
    Family("JoyImage Edit Plus", ("JoyImageEditPlusTransformer3DModel",),
           ("JoyImageEditPlusAttention.attn",), at.joyimage_edit_plus,
           along(image_rotary_emb=1, attention_mask=-1), mask=True, references=True, joint="last"),
    Family("NucleusMoE", ("NucleusMoEImageTransformer2DModel",), ("Attention.attn",),
           at.in_sequence(at.qwen_image, after=None),
           along(image_rotary_emb=[0, None], attention_mask=-1), mask=True,
           joint="last", text_keys=_text_or_its_cache,
           blocks="each of its experts picks the tokens that it computes"),
    Family("HiDream", ("HiDreamImageTransformer2DModel",), ("HiDreamAttention.attn1",), at.hidream,
           along(image_rotary_emb=1, hidden_states_masks=1), inputs=("norm_hidden_states",),
           text="norm_encoder_hidden_states", joint="last"),
    # Text and image share one sequence.
    Family("Krea 2", ("Krea2Transformer2DModel",), ("Krea2Attention.attn",), at.krea2, MASKED,
           outside=("text_fusion",), mask=True, eager=True),
    Family("Ideogram 4", ("Ideogram4Transformer2DModel",), ("Ideogram4Attention.attention",),
           at.ideogram4, along(image_rotary_emb=1, attention_mask=(-2, -1)), mask=True, eager=True),
    Family("Qwen-Image 2.1", ("QwenImage21Transformer2DModel",), ("QwenImage21Attention.attn",),
           at.qwen_image_21, along(rotary_emb=0, key_valid=1), mask=True, cached=_from_cache),
    Family("ERNIE-Image", ("ErnieImageTransformer2DModel",),
           ("ErnieImageAttention.self_attention",), at.in_sequence(at.patches, after=None),
           along(image_rotary_emb=1, attention_mask=-1), mask=True, sequence_first=True,
           blocks="its blocks take tokens before samples"),
    Family("Z-Image", ("ZImageTransformer2DModel", "ZImageControlNetModel"),
           ("Attention.attention",), at.z_image, along(freqs_cis=1, attention_mask=1),
           outside=("context_refiner", "siglip_refiner"), mask=True),
    Family("Bria FIBO 2", ("BriaFibo2Transformer2DModel",), ("BriaFibo2Attention.attention",),
           at.bria_fibo2, along(freqs_cis=1, attention_mask=1), mask=True, eager=True),
    Family("MiniMax H3", ("MiniMaxH3Transformer3DModel",), ("MiniMaxH3Attention.attn",),
           at.minimax_h3, along(rotary_emb=0), outside=("token_refiner",), eager=True),
    Family("Cosmos 3", ("Cosmos3OmniTransformer",), ("Cosmos3PackedMoTAttention.self_attn",),
           at.cosmos3, inputs=("gen_seq",), text="und_seq", queries=False, joint="first"),
    # Self-attention over the image alone, with separate cross-attention to the text.
    Family("Wan",
           ("WanTransformer3DModel", "WanVACETransformer3DModel", "WanAnimateTransformer3DModel",
            "ChronoEditTransformer3DModel"),
           ("WanAttention.attn1",), at.patches, along(rotary_emb=1)),
    Family("SkyReels V2", ("SkyReelsV2Transformer3DModel",), ("SkyReelsV2Attention.attn1",),
           at.patches, along(rotary_emb=1)),
    Family("AnyFlow", ("AnyFlowTransformer3DModel",), ("AnyFlowAttention.attn1",),
           at.sides_at(1, 3, 4), along(rotary_emb=-2)),
    Family("Helios", ("HeliosTransformer3DModel",), ("HeliosAttention.attn1",),
           at.in_sequence(at.patches, before=None), along(rotary_emb=1)),
    Family("Allegro", ("AllegroTransformer3DModel",), ("Attention.attn1",), at.patches,
           along(image_rotary_emb=[None, -1], attention_mask=-1), mask=True),
    Family("Cosmos", ("CosmosTransformer3DModel", "CosmosControlNetModel"),
           ("Attention.attn1", "CosmosAttention.attn1"), at.patches, ROTARY,
           blocks="its blocks add positions to the tokens, which a fit on the tokens can't know"),
    Family("LTX", ("LTXVideoTransformer3DModel",), ("LTXAttention.attn1",), at.ltx,
           along(image_rotary_emb=1)),
    Family("LTX-2", ("LTX2VideoTransformer3DModel",), ("LTX2Attention.attn1",), at.ltx2,
           along(query_rotary_emb=-2, attention_mask=(-2, -1)), mask=True,
           leaves=("perturbation_mask",), blocks="its sound attends to all of the video's tokens"),
    Family("Sana-WM refiner", ("SanaWMLTX2RefinerTransformer3DModel",),
           ("SanaWMLTX2Attention.attn1",), at.in_a_row, along(query_rotary_emb=-2),
           cached=_from_cache),
    Family("Kandinsky 5", ("Kandinsky5Transformer3DModel",),
           ("Kandinsky5Attention.self_attention",), at.sides_at(1, 2, 3), along(rotary_emb=1),
           outside=("text_transformer_blocks",), leaves=("sparse_params",)),
    Family("Kandinsky 6", ("Kandinsky6Transformer3DModel",),
           ("Kandinsky6Attention.self_attention",), at.sides_at(1, 2, 3), along(rotary_emb=0),
           outside=("audio_dec_block",), blocks="its blocks are called part by part"),
    Family("Latte", ("LatteTransformer3DModel",), ("Attention.attn1",), at.sides_at(-2, -1),
           outside=("temporal_transformer_blocks",)),
    # UNets whose attention is not in a Transformer2DModel.
    Family("Amused", ("UVit2DModel",), ("Attention.attn1",), at.amused,
           outside=("down_block", "up_block")),
    Family("DreamLite", ("DreamLiteTransformer2DModel",), ("Attention.attn1",),
           at.pixels("hidden_states")),
    Family("Kandinsky 3", ("Kandinsky3AttentionBlock",), ("Attention.attention",), at.pixels("x"),
           inputs=QUERY_AND_KEY),
    Family("unconditional UNet", ("UNet2DModel",), ("Attention",), at.of_levels, queries=False),
    Family("Stable Cascade", ("StableCascadeUNet",), ("Attention.attention",), at.of_levels,
           queries=False, joint="last",
           text_keys=_next_to_image),
)
# fmt: on
# UNets, DiT, PixArt: self-attention over the image's tokens alone. If a processor adds further
# keys, the image's keys can't be identified, and the layer is not merged.
IMAGE_ALONE = Family(
    "UNet",
    at.IMAGE_MODULES,
    (),
    at.image_or_patches,
    leaves=("image_rotary_emb", "query_rotary_emb", "key_rotary_emb", "rotary_emb"),
)  # fmt: skip
# UNets whose attention takes an image [B, C, H, W] and prepends the text's keys: Kandinsky 2,
# DeepFloyd IF, UnCLIP.
ADDED_KEYS = Family("added keys", (), (), at.of_levels, queries=False, joint="first")
_MODELS = {model: family for family in BUILT_IN for model in family.models}


def adds_keys(module: nn.Module) -> bool:
    """Return True if a module is an attention of `ADDED_KEYS`."""
    kind = type(getattr(module, "processor", None)).__name__
    return kind.startswith("AttnAddedKV") and not getattr(module, "only_cross_attention", True)


def family_of(model: nn.Module) -> Family | None:
    """Return the family of a model by the name of its class or of one of its bases.

    Families that users have registered take precedence over the built-in ones. The result is None
    for an unknown model.
    """
    for kind in class_names(model):
        for families in (REGISTERED, _MODELS):
            if kind in families:
                return families[kind]
    return None
