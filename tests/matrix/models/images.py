"""Transformers of images."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.builders.transformers import IMAGE, TEXT, H, W, flux_inputs, normal
from tests.matrix.models.case import BLC, WORDS, Case, case, rotations

HALF = {"timestep": torch.tensor([0.5, 0.5])}
SIZES = {name: torch.full((2, 2), 64.0) for name in ("original_size", "target_size", "crop_coords")}
HUNYUAN_DIT: dict[str, Any] = {  # of the model and of its ControlNet
    "sample_size": 32,
    "patch_size": 2,
    "cross_attention_dim": 16,
    "cross_attention_dim_t5": 16,
    "text_len": TEXT,
    "text_len_t5": TEXT,
    "activation_fn": "gelu-approximate",
}


def hunyuan_dit() -> dict[str, Any]:
    return {
        "text_embedding_mask": torch.ones(2, TEXT),
        "encoder_hidden_states_t5": normal(2, TEXT, 16, seed=2),
        "text_embedding_mask_t5": torch.ones(2, TEXT),
        "image_meta_size": torch.ones(2, 6),
        "style": torch.zeros(2, dtype=torch.long),
        "image_rotary_emb": rotations(H * W),
    }


def four_ids(**more: Any) -> Any:
    """Ids of Flux 2: (image, row, column, word)."""

    def inputs() -> dict[str, Any]:
        image = torch.cat([flux_inputs()["img_ids"], torch.zeros(H * W, 1)], 1)
        text = torch.cat([torch.zeros(TEXT, 3), torch.arange(TEXT)[:, None]], 1)
        return {"img_ids": image, "txt_ids": text, **HALF, **more}

    return inputs


def krea() -> dict[str, Any]:
    ids = torch.zeros(TEXT + H * W, 3)
    ids[TEXT:, 1:] = torch.cartesian_prod(torch.arange(H), torch.arange(W)).float()
    mask = torch.ones(2, TEXT, dtype=torch.bool)
    mask[1, -2:] = False
    return {
        "encoder_hidden_states": normal(2, TEXT, 2, 16),
        "position_ids": ids,
        "encoder_attention_mask": mask,
        **HALF,
    }


def ideogram() -> dict[str, Any]:
    total = TEXT + H * W
    ids = torch.zeros(2, total, 3, dtype=torch.long)
    ids[:, :TEXT] = torch.arange(TEXT)[:, None]
    ids[:, TEXT:, 0] = 65536
    ids[:, TEXT:, 1:] = 65536 + torch.cartesian_prod(torch.arange(H), torch.arange(W))
    indicator = torch.full((2, total), 2)
    indicator[:, :TEXT] = 3
    segments = torch.ones(2, total, dtype=torch.long)
    segments[1, :2], indicator[1, :2] = -1, 0  # a shorter caption, filled up at its left
    return {
        "hidden_states": normal(2, total, 4),
        "encoder_hidden_states": normal(2, total, 16),
        "position_ids": ids,
        "segment_ids": segments,
        "indicator": indicator,
        **HALF,
    }


def qwen21() -> dict[str, Any]:
    """Text, and the generated image behind it."""
    mask = torch.zeros(1, TEXT + H * W // 4, dtype=torch.bool)
    mask[:, TEXT:] = True
    return {
        "img_shapes": [[(1, H, W)], [(1, H, W)]],
        "img_mask": mask.expand(2, -1),
        **HALF,
    }


def omnigen() -> dict[str, Any]:
    total = 12 + 1 + H * W
    return {
        **HALF,
        "input_ids": torch.arange(12).expand(2, -1),
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": torch.ones(2, total, total),
        "position_ids": torch.arange(total).expand(2, -1),
    }


def listed(**more: Any) -> Any:
    """Z-Image: 96 tokens of an image and 7 of a caption, each filled up to a multiple of 32."""
    return lambda: {
        "x": list(normal(2, 4, 1, 2 * H, 2 * W)),
        "t": torch.tensor([0.5, 0.5]),
        "cap_feats": list(WORDS),
        **more,
    }


def z_image(**more: Any) -> Case:
    name, sides = "ZImageTransformer2DModel", (256, 64, 64)
    latents = "x BCFHW"
    return case(name, listed(), latents, "cap_feats", dim=32, n_layers=2, axes_lens=sides, **more)


def z_control() -> nn.Module:
    """Build a ControlNet of Z-Image with the parts that it borrows from its transformer."""
    own = case(
        "ZImageControlNetModel",
        dim=32,
        control_layers_places=[0, 1],
        control_refiner_layers_places=[0],
        control_in_dim=4,
        add_control_noise_refiner="control_noise_refiner",
    ).build()
    borrowed: nn.Module = type(own).from_transformer(own, z_image().build())
    return borrowed


def omni() -> dict[str, Any]:
    """Return inputs of Z-Image with a reference image, to which SigLIP's features belong."""
    reference, image = normal(4, 1, H, W), normal(4, 1, 2 * H, 2 * W, seed=1)
    return {
        "x": [[reference, image], [reference + 1, image + 1]],
        "t": torch.tensor([0.5, 0.5]),
        "cap_feats": [[WORDS[i], WORDS[i, :5]] for i in range(2)],
        "siglip_feats": [[normal(3, 4, 16), None] for _ in range(2)],
        "image_noise_mask": [[0, 1]] * 2,
    }


def hidream() -> dict[str, Any]:
    """Return inputs with an image that isn't square; the model pads it to its largest size."""
    return {
        "encoder_hidden_states_t5": normal(2, TEXT, 16),
        "encoder_hidden_states_llama3": normal(2, 2, TEXT, 16),
        "pooled_embeds": normal(2, 8),
        "timesteps": torch.tensor([500.0, 500.0]),
    }


CASES = [
    case(
        "PixArtTransformer2DModel",
        lambda: {
            "hidden_states": IMAGE,
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
            "timestep": torch.tensor([5, 5]),
        },
        "",
        sample_size=32,
    ),
    case(
        "DiTTransformer2DModel",
        lambda: {
            "hidden_states": normal(2, 4, 32, 32),
            "timestep": torch.tensor([5, 5]),
            "class_labels": torch.tensor([1, 2]),
        },
        "",
        sample_size=32,
    ),
    case("HunyuanDiT2DModel", hunyuan_dit, **HUNYUAN_DIT, num_layers=4),
    case(
        "LuminaNextDiT2DModel",
        lambda: {
            "encoder_mask": torch.ones(2, TEXT),
            "image_rotary_emb": torch.polar(torch.ones(32, 32, 8), normal(32, 32, 8)),
            "cross_attention_kwargs": {"base_sequence_length": 64},
            **HALF,
        },
        sample_size=32,
        num_kv_heads=1,
        cross_attention_dim=16,
    ),
    case("SD3Transformer2DModel", sample_size=32),
    case("FluxTransformer2DModel", lambda: HALF, BLC, num_single_layers=2),
    case(
        "ChromaTransformer2DModel",
        lambda: {
            "attention_mask": torch.tensor([[True] * 5 + [False] * 2 + [True] * H * W] * 2),
            **HALF,
        },
        BLC,
        num_single_layers=2,
    ),
    case(
        "QwenImageTransformer2DModel",
        lambda: {
            "hidden_states": normal(2, H * W, 16),
            "encoder_hidden_states_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2]),
            "img_shapes": [[(1, H, W)]] * 2,
            **HALF,
        },
        BLC,
        in_channels=16,
    ),
    case("AuraFlowTransformer2DModel", lambda: HALF),
    case("CogView3PlusTransformer2DModel", lambda: SIZES),
    case("CogView4Transformer2DModel", lambda: SIZES),
    case(
        "GlmImageTransformer2DModel",
        lambda: {
            "prior_token_id": torch.arange(H * W).expand(2, -1) % 16,
            "prior_token_drop": torch.zeros(2, H * W, dtype=torch.bool),
            "target_size": torch.full((2, 2), 64.0),
            "crop_coords": torch.zeros(2, 2),
        },
        prior_vq_quantizer_codebook_size=16,
    ),
    case("PRXTransformer2DModel", lambda: HALF, depth=2, axes_dim=[8, 8]),
    case(
        "Flux2Transformer2DModel",
        four_ids(),
        BLC,
        num_layers=1,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    ),
    case(
        "Flux3Transformer2DModel",
        four_ids(image_cond_hidden_states=normal(2, 20, 4), image_cond_ids=torch.ones(20, 4)),
        BLC,
        num_layers=1,
        axes_dims_rope=(4, 4, 4, 4),
        cond_in_channels=4,
    ),
    case("BriaTransformer2DModel", lambda: HALF, BLC, num_layers=1),
    case(
        "BriaFiboTransformer2DModel",
        lambda: {
            "text_encoder_layers": [normal(2, TEXT, 16)] * 2,
            "joint_attention_kwargs": {
                "attention_mask": torch.zeros(2, 1, TEXT + H * W, TEXT + H * W)
            },
            **HALF,
        },
        BLC,
        num_layers=1,
    ),
    case("OvisImageTransformer2DModel", lambda: HALF, BLC, num_layers=1),
    case("LongCatImageTransformer2DModel", lambda: HALF, BLC, num_layers=1),
    case(
        "Krea2Transformer2DModel",
        krea,
        BLC,
        num_text_layers=2,
        text_intermediate_size=16,
    ),
    case(
        "Ideogram4Transformer2DModel",
        ideogram,
        image="hidden_states B7LC",
        mrope_section=(4, 2, 2),
    ),
    case("QwenImage21Transformer2DModel", qwen21, BLC),
    case(
        "OmniGenTransformer2DModel",
        omnigen,
        pad_token_id=0,
        vocab_size=32,
        rope_scaling={"long_factor": list(range(1, 9)), "short_factor": list(range(1, 9))},
    ),
    case(
        "Lumina2Transformer2DModel",
        lambda: {"encoder_attention_mask": torch.ones(2, TEXT, dtype=torch.bool), **HALF},
        num_kv_heads=1,
        axes_dim_rope=(4, 4, 8),
    ),
    case(
        "ErnieImageTransformer2DModel",
        lambda: {
            "hidden_states": normal(2, 4, H, W),
            "text_bth": WORDS,
            "text_lens": torch.tensor([TEXT, 4]),
            **HALF,
        },
        text="text_bth",
        ffn_hidden_size=32,
    ),
    z_image(),
    Case(
        "ZImageControlNetModel",
        z_control,
        listed(control_context=list(normal(2, 4, 1, 2 * H, 2 * W))),
        "x BCFHW",
        "cap_feats",
    ),
    case(
        "BriaFibo2Transformer2DModel",
        lambda: {"encoder_hidden_states": normal(2, 2, TEXT, 16), **HALF},
        text="",
        dim=32,
        n_layers=2,
        injection_layer_ids=(1,),
        min_num_gist_tokens=4,
        max_num_gist_tokens=8,
    ),
    case(
        "HiDreamImageTransformer2DModel",
        hidream,
        text="encoder_hidden_states_t5",
        patch_size=2,
        num_layers=1,
        caption_channels=[16, 16],
        text_emb_dim=8,
        axes_dims_rope=(8, 4, 4),
        max_resolution=(24, 24),
        llama_layers=(0, 1),
        force_inference_output=True,
    ),
    case(
        "NucleusMoEImageTransformer2DModel",
        lambda: {
            "encoder_hidden_states_mask": torch.ones(2, TEXT, dtype=torch.bool),
            "img_shapes": [(1, H, W)] * 2,
            **HALF,
        },
        BLC,
        moe_enabled=False,
        mlp_ratio=16.0,
        capacity_factors=[8.0, 8.0],
    ),
    case(
        "JoyImageEditPlusTransformer3DModel",
        lambda: {
            "hidden_states": normal(2, H * W + 20, 4, 1, 2, 2),
            "encoder_hidden_states_mask": torch.ones(2, TEXT),
            "shape_list": [[(1, H, W), (1, 4, 5)], [(1, H, W), (1, 2, 5)]],
        },
        image="hidden_states BL",
        rope_dim_list=[4, 4, 8],
    ),
]
