"""The real engine, where MAME_COMFYUI names a checkout of ComfyUI and its requirements are
installed; tiny models of its own classes.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mame_sd import embedded_model_path

CHECKOUT = os.environ.get("MAME_COMFYUI", "")
needs_engine = pytest.mark.skipif(not CHECKOUT, reason="MAME_COMFYUI names no checkout of ComfyUI")


def engine() -> Any:
    """The package `comfy` of the checkout, on the CPU."""
    if CHECKOUT not in sys.path:
        sys.path.append(str(Path(CHECKOUT)))
    from comfy.cli_args import args

    args.cpu = True
    args.use_pytorch_cross_attention = True  # as diffusers does
    import comfy.model_base
    import comfy.model_patcher
    import comfy.sample
    import comfy.samplers
    import comfy.supported_models

    return comfy


@dataclass(frozen=True)
class Tiny:
    """A tiny model: its names in `comfy.supported_models` and, where that is another one, in
    `comfy.model_base`; its size; what a call of it takes, and how many samples.
    """

    config: str
    size: dict[str, Any]
    base: str = ""
    latent: tuple[int, ...] = (16, 16, 24)
    context: tuple[int, int] = (7, 24)
    extra: dict[str, tuple[int, ...]] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    batch: int = 2


# fmt: off
VIDEO = (16, 3, 16, 24)  # channels, frames, rows and columns of a latent
UNET = {"image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32,
    "num_res_blocks": [1, 1], "channel_mult": [1, 2], "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1], "transformer_depth_middle": 1,
    "use_spatial_transformer": True, "legacy": False}
HEADS = {"hidden_size": 64, "num_heads": 2, "mlp_ratio": 2.0, "depth": 1, "depth_single_blocks": 1,
    "theta": 10000}
FLUX = {**HEADS, "in_channels": 16, "out_channels": 16, "context_in_dim": 24,
    "axes_dim": [8, 12, 12], "qkv_bias": True}
FLUX_1 = {**FLUX, "vec_in_dim": 48, "patch_size": 2, "guidance_embed": True, "txt_ids_dims": []}
FLUX_2 = {**FLUX, "vec_in_dim": None, "patch_size": 1, "axes_dim": [8, 8, 8, 8], "qkv_bias": False,
    "guidance_embed": True, "global_modulation": True, "mlp_silu_act": True, "ops_bias": False,
    "txt_ids_dims": [3], "default_ref_method": "index"}
LUMINA = {"in_channels": 16, "dim": 64, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2,
    "n_kv_heads": 1, "qk_norm": True, "cap_feat_dim": 24, "axes_dims": [8, 12, 12],
    "axes_lens": [300, 512, 512]}
Z_IMAGE = {**LUMINA, "n_kv_heads": 2, "pad_tokens_multiple": 32}
QWEN = {"num_layers": 2, "attention_head_dim": 32, "num_attention_heads": 2,
    "joint_attention_dim": 24, "pooled_projection_dim": 24, "axes_dims_rope": (8, 12, 12)}
HUNYUAN = {**FLUX, "vec_in_dim": 48, "patch_size": [1, 2, 2], "guidance_embed": False,
    "byt5": False, "meanflow": False, "use_cond_type_embedding": False, "vision_in_dim": None,
    "meanflow_sum": False}
WAN = {"dim": 64, "ffn_dim": 64, "freq_dim": 32, "text_dim": 24, "num_heads": 2, "num_layers": 2}
COSMOS = {"max_img_h": 32, "max_img_w": 32, "max_frames": 8, "in_channels": 16, "out_channels": 16,
    "patch_spatial": 2, "patch_temporal": 1, "model_channels": 64, "num_blocks": 2, "num_heads": 2,
    "mlp_ratio": 2.0, "crossattn_emb_channels": 24, "pos_emb_cls": "rope3d", "use_adaln_lora": True,
    "adaln_lora_dim": 16}
TINY = {
    "SD 1.5": Tiny("SD15", {**UNET, "context_dim": 24, "num_heads": 2}, base="BaseModel",
        latent=(4, 16, 24)),
    "SDXL": Tiny("SDXL", {**UNET, "model_channels": 64, "context_dim": 24,
        "use_linear_in_transformer": True, "num_classes": "sequential", "adm_in_channels": 48},
        latent=(4, 16, 24), extra={"y": (48,)}),
    "SD3": Tiny("SD3", {"depth": 2, "in_channels": 16, "adm_in_channels": 48, "context_size": 64,
        "num_patches": 144, "input_size": None,
        "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 24,
        "out_features": 128}}, "pos_embed_max_size": 12, "x_block_self_attn_layers": [0],
        "qk_norm": "rms"}, extra={"y": (48,)}),
    "Flux": Tiny("Flux", FLUX_1, extra={"y": (48,), "guidance": ()}),
    "Flux, a reference": Tiny("Flux", FLUX_1, extra={"y": (48,), "guidance": ()},
        constants={"ref_latents": [torch.ones(2, 16, 8, 12)]}),
    "Chroma": Tiny("Chroma", {**FLUX, "in_channels": 64, "out_channels": 64, "vec_in_dim": 48,
        "patch_size": 2, "txt_ids_dims": [], "in_dim": 64, "out_dim": 64, "hidden_dim": 32,
        "n_layers": 1}, extra={"guidance": ()}),
    "Qwen-Image": Tiny("QwenImage", QWEN, latent=(16, 1, 16, 24)),
    "Qwen-Image, a reference": Tiny("QwenImage", QWEN, latent=(16, 1, 16, 24),
        constants={"ref_latents": [torch.ones(2, 16, 1, 8, 12)]}),
    "Lumina 2": Tiny("Lumina2", LUMINA, constants={"num_tokens": 7}),
    "AuraFlow": Tiny("AuraFlow", {"dim": 64, "n_layers": 2, "n_double_layers": 1, "n_heads": 2,
        "global_conddim": 64, "cond_seq_dim": 24, "max_seq": 144}, latent=(4, 16, 24)),
    "HunyuanVideo": Tiny("HunyuanVideo", HUNYUAN, latent=VIDEO, extra={"y": (48,)}),
    "Wan": Tiny("WAN21_T2V", WAN, base="WAN21", latent=VIDEO),
    "LTX-Video": Tiny("LTXV", {"in_channels": 16, "cross_attention_dim": 64,
        "attention_head_dim": 32, "num_attention_heads": 2, "caption_channels": 24,
        "num_layers": 2}, latent=(16, 3, 8, 12), extra={"attention_mask": ()},
        constants={"frame_rate": 25}),
    "Krea 2": Tiny("Krea2", {"features": 64, "tdim": 32, "txtdim": 24, "heads": 2, "kvheads": 1,
        "multiplier": 2, "layers": 2, "txtlayers": 2, "txtheads": 2, "txtkvheads": 2},
        context=(7, 48)),
    "Ideogram 4": Tiny("Ideogram4", {"in_channels": 16, "num_layers": 2, "num_attention_heads": 2,
        "attention_head_dim": 32, "intermediate_size": 64, "adaln_dim": 32,
        "mrope_section": (6, 5, 5), "llm_features_dim": 24}, latent=(16, 8, 12)),
    "HiDream": Tiny("HiDream", {"patch_size": 2, "in_channels": 16, "out_channels": 16,
        "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 32, "num_attention_heads": 2,
        "caption_channels": [24, 24], "text_emb_dim": 48, "axes_dims_rope": (16, 8, 8),
        "max_resolution": (32, 32), "llama_layers": [0, 1]}, context=(3, 24), extra={"y": (48,),
        "encoder_hidden_states_llama3": (2, 2, 24)}),
    "OmniGen 2": Tiny("Omnigen2", {"in_channels": 16, "hidden_size": 64, "num_layers": 1,
        "num_refiner_layers": 1, "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 32,
        "axes_dim_rope": (8, 12, 12), "text_feat_dim": 24}, constants={"num_tokens": 7}),
    "Kandinsky 5": Tiny("Kandinsky5", {"in_text_dim": 24, "in_text_dim2": 48, "time_dim": 32,
        "model_dim": 64, "ff_dim": 64, "visual_embed_dim": 64, "num_text_blocks": 1,
        "num_visual_blocks": 2, "axes_dims": (8, 12, 12)}, latent=VIDEO, extra={"y": (48,)}),
    "Cosmos": Tiny("CosmosT2V", {**COSMOS, "block_x_format": "THWBD", "affline_emb_norm": True,
        "extra_per_block_abs_pos_emb": True, "extra_per_block_abs_pos_emb_type": "learnable"},
        base="CosmosVideo", latent=VIDEO, constants={"fps": 24}),
    "Cosmos Predict2": Tiny("CosmosT2IPredict2", COSMOS, base="CosmosPredict2", latent=VIDEO),
    "Anima": Tiny("Anima", COSMOS, latent=(16, 1, 16, 24)),
    "Mochi": Tiny("GenmoMochi", {"in_channels": 16, "hidden_size_x": 64, "hidden_size_y": 32,
        "depth": 2, "num_heads": 2, "mlp_ratio_x": 192.0, "mlp_ratio_y": 192.0, "t5_feat_dim": 24,
        "t5_token_length": 7, "use_t5": True, "learn_sigma": False, "qk_norm": True}, latent=VIDEO,
        extra={"attention_mask": (7,)}, constants={"num_tokens": 5}),
    "CogVideoX": Tiny("CogVideoX_T2V", {"num_attention_heads": 2, "attention_head_dim": 32,
        "time_embed_dim": 32, "text_embed_dim": 24, "num_layers": 2,
        "use_rotary_positional_embeddings": True, "sample_width": 24, "sample_height": 16,
        "sample_frames": 9}, base="CogVideoX", latent=VIDEO),
    "LTX-2": Tiny("LTXAV", {"in_channels": 16, "audio_in_channels": 128, "cross_attention_dim": 64,
        "audio_cross_attention_dim": 32, "attention_head_dim": 32, "num_attention_heads": 2,
        "audio_attention_head_dim": 16, "audio_num_attention_heads": 2, "num_layers": 2,
        "caption_channels": 24}, latent=(1, 16 * 3 * 8 * 12 + 8 * 10 * 16), context=(7, 48),
        extra={"attention_mask": ()}, constants={"frame_rate": 25,
        "latent_shapes": [(2, 16, 3, 8, 12), (2, 8, 10, 16)]}),
    "Wan, a reference frame": Tiny("WAN21_T2V", {**WAN, "in_dim_ref_conv": 16}, base="WAN21",
        latent=VIDEO, extra={"reference_latent": (16, 16, 24)}),
    "Wan, frames behind": Tiny("WAN21_T2V", WAN, base="WAN21", latent=VIDEO,
        extra={"time_dim_concat": (16, 1, 16, 24)}),
    "Wan SCAIL": Tiny("WAN21_SCAIL", {**WAN, "model_type": "scail", "in_dim": 16}, latent=VIDEO,
        extra={"reference_latent": (16, 1, 16, 24), "pose_latents": (16, 3, 8, 12)}),
    "Wan SCAIL 2": Tiny("WAN21_SCAIL2", {**WAN, "model_type": "scail2", "in_dim": 16}, latent=VIDEO,
        extra={"reference_latent": (16, 2, 16, 24)}, constants={"ref_mask_flag": None}),
    "Wan Animate": Tiny("WAN22_Animate", {**WAN, "model_type": "animate", "motion_encoder_dim": 64},
        latent=VIDEO),
    "Wan S2V": Tiny("WAN22_S2V", {**WAN, "model_type": "s2v", "audio_dim": 24,
        "audio_inject_layers": [0]}, latent=VIDEO, extra={"reference_latent": (16, 1, 16, 24)}),
    "Flux 2": Tiny("Flux2", FLUX_2, latent=(16, 8, 12), extra={"guidance": ()}),
    "Flux 2, a reference": Tiny("Flux2", FLUX_2, latent=(16, 8, 12), extra={"guidance": ()},
        constants={"ref_latents": [torch.ones(2, 16, 4, 6)]}),
    "Chroma Radiance": Tiny("ChromaRadiance", {**FLUX, "in_channels": 3, "out_channels": 3,
        "vec_in_dim": 48, "patch_size": 16, "txt_ids_dims": [], "in_dim": 64, "out_dim": 64,
        "hidden_dim": 32, "n_layers": 1, "nerf_hidden_size": 8, "nerf_mlp_ratio": 2,
        "nerf_depth": 1, "nerf_max_freqs": 2, "nerf_tile_size": 0, "nerf_final_head_type": "conv",
        "nerf_embedder_dtype": None, "use_x0": False, "use_sequential_txt_ids": False},
        latent=(3, 128, 192), extra={"guidance": ()}),
    "Qwen-Image Layered": Tiny("QwenImage", {**QWEN, "use_additional_t_cond": True}, latent=VIDEO,
        constants={"additional_t_cond": torch.zeros(2, dtype=torch.long)}),
    "HunyuanVideo 1.5": Tiny("HunyuanVideo15", {**HUNYUAN, "vec_in_dim": None, "vision_in_dim": 24,
        "use_cond_type_embedding": True}, latent=VIDEO, extra={"clip_fea": (5, 24)}),
    "HunyuanImage 2.1": Tiny("HunyuanImage21", {**HUNYUAN, "vec_in_dim": None, "patch_size": [1, 1],
        "byt5": True, "axes_dim": [16, 16]}, latent=(16, 8, 12), extra={"txt_byt5": (3, 1472)}),
    "Z-Image": Tiny("Lumina2", Z_IMAGE, latent=(16, 18, 26), constants={"num_tokens": 7}),
    "Z-Image, references": Tiny("Lumina2", {**Z_IMAGE, "siglip_feat_dim": 24}, latent=(16, 18, 26),
        constants={"num_tokens": 7, "ref_latents": [torch.ones(1, 16, 8, 12)],
        "ref_contexts": [torch.ones(1, 9, 24)], "siglip_feats": [torch.ones(1, 4, 6, 24)]}),
    "Z-Image, longer contexts than the image": Tiny("Lumina2", {**Z_IMAGE, "siglip_feat_dim": 24},
        latent=(16, 16, 20), constants={"num_tokens": 7,
        "ref_latents": [torch.ones(1, 16, 16, 20)] * 2, "ref_contexts": [torch.ones(1, 90, 24)] * 2,
        "siglip_feats": [torch.ones(1, 20, 20, 24)] * 2}),
    "Wan, context latents": Tiny("WAN21_T2V", WAN, base="WAN21", latent=VIDEO,
        constants={"context_latents": [torch.ones(2, 16, 1, 8, 12)]}),
    "Wan VACE": Tiny("WAN21_Vace", {**WAN, "model_type": "vace", "vace_layers": 1,
        "vace_in_dim": 16}, latent=VIDEO, extra={"vace_context": (1, 16, 3, 16, 24)},
        constants={"vace_strength": [1.0]}),
    "MiniMax H3": Tiny("MiniMaxH3", {"hidden_size": 64, "num_layers": 2,
        "token_refiner_num_layers": 1, "text_dim": 24, "num_attention_heads": 2,
        "attention_head_dim": 32, "ffn_hidden_size": 64, "timestep_input_dim": 16,
        "time_embed_hidden_size": 64, "time_embed_dim": 32, "rope_inv_freq_len": 4},
        latent=(1, 28288), constants={"latent_shapes": ((1, 24, 3, 16, 24), (1, 32, 2, 10))},
        batch=1),
    "ERNIE-Image": Tiny("ErnieImage", {"hidden_size": 64, "num_attention_heads": 2, "num_layers": 2,
        "ffn_hidden_size": 64, "in_channels": 16, "out_channels": 16, "text_in_dim": 24,
        "rope_axes_dim": (8, 12, 12)}),
}
HANDED = {"ERNIE-Image"}  # whose attention the node hands on, and the engine to no other
# What 0.3.64, the oldest engine that the node runs in, does otherwise than 0.33.0 has it recorded.
OLDEST = "0.3.64"
OTHER_CALLS = {
    "OmniGen 2": "repeats the heads of keys",
    "Z-Image": "pads no image",
}
OTHER_MODELS = {
    "PixArt": "draws on CUDA",
    "Qwen-Image Layered": "has one layer",
    "Wan S2V": "hands its attention to no node",
    "Z-Image, longer contexts than the image": "takes no references",
    "Z-Image, references": "takes no references",
}
HIDDEN = {  # whose attention no node is handed
    "PixArt": Tiny("PixArtSigma", {"input_size": 48, "in_channels": 4, "hidden_size": 64,
        "depth": 2, "num_heads": 2, "caption_channels": 24, "model_max_length": 7,
        "micro_condition": False}, base="PixArt", latent=(4, 32, 48)),
    "HunyuanDiT": Tiny("HunyuanDiT", {"input_size": 24, "hidden_size": 64, "depth": 2,
        "num_heads": 2, "text_states_dim": 24, "text_states_dim_t5": 64, "text_len": 7,
        "text_len_t5": 5}, latent=(4, 16, 24), extra={"text_embedding_mask": (7,),
        "encoder_hidden_states_t5": (5, 64), "text_embedding_mask_t5": (5,),
        "image_meta_size": (6,)}),
}
# fmt: on


def skip_other(name: str, others: dict[str, str]) -> None:
    """Skip a test of what the oldest engine does otherwise, by `OTHER_CALLS` or `OTHER_MODELS`."""
    engine()
    from comfyui_version import __version__ as version

    if version == OLDEST and name in others:
        pytest.skip(f"{name} of {version} {others[name]}")


def patcher(name: str, **size: Any) -> Any:
    """ComfyUI's ModelPatcher around a tiny model of `TINY` or `HIDDEN`, with seeded weights."""
    comfy, tiny = engine(), (TINY | HIDDEN)[name]
    torch.manual_seed(0)
    model = _made(comfy, tiny, {**tiny.size, **size, "dtype": torch.float32})
    for key, tensor in model.diffusion_model.state_dict().items():
        if tensor.is_floating_point() and not key.startswith("__"):
            torch.nn.init.normal_(tensor, std=0.3)
    return comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def _made(comfy: Any, tiny: Tiny, size: dict[str, Any]) -> Any:
    """The model, without the arguments of `size` that an older engine does not know."""
    config = getattr(comfy.supported_models, tiny.config)(size)
    config.unet_config |= size  # over what the engine adds
    config.custom_operations = comfy.ops.disable_weight_init
    try:
        return getattr(comfy.model_base, tiny.base or tiny.config)(config, device="cpu")
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None:
            raise
        return _made(comfy, tiny, {key: value for key, value in size.items() if key != unknown[1]})


def inputs(name: str, batch: int | None = None, seed: int = 1) -> dict[str, Any]:
    """What `apply_model` takes."""
    tiny, generator = (TINY | HIDDEN)[name], torch.Generator().manual_seed(seed)
    batch = tiny.batch if batch is None else batch
    values: dict[str, Any] = {
        "x": torch.randn(batch, *tiny.latent, generator=generator),
        "t": torch.full((batch,), 0.7),
        "c_crossattn": torch.randn(batch, *tiny.context, generator=generator),
    }
    extra = {
        key: torch.randn(batch, *shape, generator=generator) for key, shape in tiny.extra.items()
    }
    if tiny.extra.get("attention_mask") == ():
        extra["attention_mask"] = None
    return values | extra | tiny.constants


@torch.no_grad()
def call(model: Any, name: str, options: dict[str, Any] | None = None, **changes: Any) -> Tensor:
    """One call of the model with the options and wrappers that a sampler would give it."""
    comfy = engine()
    wrappers = {
        kind: {key: list(found) for key, found in keys.items()}
        for kind, keys in model.wrappers.items()
    }
    given = comfy.model_patcher.create_model_options_clone(model.model_options)[
        "transformer_options"
    ]
    values = inputs(name) | changes
    chunks = [0, 1][: len(values["x"])]
    given |= {"sigmas": values["t"], "cond_or_uncond": chunks, "wrappers": wrappers}
    given |= options or {}
    model.patch_model(load_weights=False)  # object patches, as where a sampler loads it
    try:
        result: Tensor = model.model.apply_model(**values, transformer_options=given)
    finally:
        model.unpatch_model(unpatch_weights=False)
    return result


def sampled(
    model: Any, name: str = "SD 1.5", steps: int = 3, cfg: float = 7.0, latent: tuple[int, ...] = ()
) -> Tensor:
    """A run of the engine's own sampler on seeded noise."""
    comfy, tiny = engine(), TINY[name]
    noise = torch.randn(1, *(latent or tiny.latent), generator=torch.Generator().manual_seed(2))
    text = torch.randn(2, 1, *tiny.context, generator=torch.Generator().manual_seed(3))
    pooled = {"pooled_output": torch.zeros(1, 48)} if "y" in tiny.extra else {}
    positive, negative = ([[one, dict(pooled)]] for one in text)
    with torch.no_grad():
        result: Tensor = comfy.sample.sample(
            model,
            noise,
            steps,
            cfg,
            "euler",
            "normal",
            positive,
            negative,
            torch.zeros_like(noise),
            seed=0,
        )
    return result


def embedded_unet() -> Any:
    """ComfyUI's UNet with the embedded model's weights, which have other groups, heads and time
    embedding than it would make.
    """
    comfy, path = engine(), Path(embedded_model_path()) / "unet"
    levels = {
        "num_res_blocks": [1] * 5,
        "channel_mult": [1, 2, 4, 6, 7],
        "transformer_depth": [1, 1, 1, 1, 0],
    }
    depth = {
        "transformer_depth_output": [1, 1] * 4 + [0, 0],
        "transformer_depth_middle": 1,
        "context_dim": 192,
    }
    model = patcher("SD 1.5", **levels, **depth)
    network = model.model.diffusion_model
    weights = comfy.utils.load_torch_file(str(path / "diffusion_pytorch_model.safetensors"))
    names = comfy.utils.unet_to_diffusers({**TINY["SD 1.5"].size, **levels, **depth})
    for theirs, ours in names.items():
        if theirs in weights:
            parent, _, leaf = ours.rpartition(".")
            setattr(
                network.get_submodule(parent),
                leaf,
                torch.nn.Parameter(weights.pop(theirs).float(), requires_grad=False),
            )
    assert not weights
    heads = {32: 1, 64: 1, 128: 2, 192: 3, 224: 4}
    for module in network.modules():
        if isinstance(module, torch.nn.GroupNorm):
            module.num_groups = 16
        elif type(module).__name__ == "CrossAttention":
            module.heads = heads[module.to_q.weight.shape[0]]
    return model


def embedded_transformer() -> Any:
    """ComfyUI's SD3 with the embedded transformer's weights, by the engine's own table of their
    names.
    """
    comfy, path = engine(), Path(embedded_model_path("transformer")) / "transformer"
    weights = comfy.utils.load_torch_file(str(path / "diffusion_pytorch_model.safetensors"))
    texts, last = weights["context_embedder.weight"].shape, 5
    linear = {"in_features": texts[1], "out_features": texts[0]}
    size = {"depth": 4, "num_blocks": last + 1, "in_channels": 4, "num_patches": 32 * 32}
    size |= {"pos_embed_max_size": 32, "out_channels": 4}
    size["context_embedder_config"] = {"target": "torch.nn.Linear", "params": linear}
    size["adm_in_channels"] = weights["time_text_embed.text_embedder.linear_1.weight"].shape[1]
    model = patcher("SD3", **size, qk_norm="rms", x_block_self_attn_layers=[])
    names = comfy.utils.mmdit_to_diffusers(size)
    swap = next(to[2] for to in names.values() if isinstance(to, tuple) and len(to) == 3)
    for end in ("weight", "bias"):  # the table takes the block of number `depth` for the last
        for i in range(last + 1):
            to = f"joint_blocks.{i}.context_block.adaLN_modulation.1.{end}"
            theirs = f"transformer_blocks.{i}.norm1_context.linear.{end}"
            names[theirs] = (to, None, swap) if i == last else to
    _load(model, weights, names)
    return model


def _load(model: Any, weights: dict[str, Tensor], names: dict[str, Any]) -> None:
    """Fills the model with all of `weights`, by the engine's names, parts and changes of them."""
    ours, left = dict(model.model.diffusion_model.state_dict()), set(weights)
    for theirs in left & set(names):
        entry = names[theirs]
        name, part, change = (*(entry if isinstance(entry, tuple) else (entry,)), None, None)[:3]
        value = weights[theirs].float()
        value = value if change is None else change(value)
        target = ours[name] if part is None else ours[name].narrow(*part)
        target.copy_(value.reshape(target.shape))
        left.remove(theirs)
    assert not left, sorted(left)
