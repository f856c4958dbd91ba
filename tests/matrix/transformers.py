"""Rows of the matrix: diffusers' transformers at tiny size, images that are not square."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.builders.transformers import (
    FLUX,
    HEADS,
    IMAGE,
    PATCHED,
    STEP,
    TEXT,
    H,
    W,
    flux_inputs,
    model,
    normal,
    reference_image,
    run,
)
from tests.matrix.rows import Row

BOTH = {"kv": {"keep": 0.5}, "qkv": {"keep": 0.5, "merge": "qkv"}}
DEFAULT = {
    "default": {"keep": 0.5},
    "tau": {"tau": -1.0, "stride": (1, 2)},
}  # keys and values; queries too


def row(
    name: str, build: Any, inputs: dict[str, Any], merges: dict[int, int], **kwargs: Any
) -> Row:
    return Row(
        name,
        build,
        partial(run, inputs),
        merges,
        **{"modes": DEFAULT, "processor": "error", **kwargs},
    )


PIXART = model(
    "PixArtTransformer2DModel",
    **PATCHED,
    **HEADS,
    out_channels=8,
    cross_attention_dim=32,
    caption_channels=16,
)
PIXART_INPUTS = {
    "hidden_states": IMAGE,
    "encoder_hidden_states": normal(2, TEXT, 16),
    "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    "timestep": torch.tensor([5, 5]),
}
WAN = model(
    "WanTransformer3DModel",
    patch_size=(1, 2, 2),
    **HEADS,
    in_channels=4,
    out_channels=4,
    text_dim=16,
    freq_dim=16,
    ffn_dim=32,
    num_layers=2,
    rope_max_seq_len=32,
)

ROWS = [
    row(
        "PixArt",
        PIXART,
        PIXART_INPUTS,
        {96: 2},
        modes=BOTH,
        processor="set",
        one_liner="needs `size`",
    ),
    row(
        "DiT",
        model(
            "DiTTransformer2DModel",
            **PATCHED,
            **HEADS,
            out_channels=8,
            num_embeds_ada_norm=10,
            norm_elementwise_affine=False,
        ),
        {
            "hidden_states": normal(2, 4, 32, 32),
            "timestep": torch.tensor([5, 5]),
            "class_labels": torch.tensor([1, 2]),
        },
        {256: 2},
        modes=BOTH,
        processor="none",
    ),
    row(
        "HunyuanDiT",
        model(
            "HunyuanDiT2DModel",
            **{**PATCHED, "num_layers": 4},
            **HEADS,
            hidden_size=32,
            cross_attention_dim=16,
            cross_attention_dim_t5=16,
            pooled_projection_dim=8,
            text_len=TEXT,
            text_len_t5=TEXT,
            activation_fn="gelu-approximate",
        ),
        {
            "hidden_states": IMAGE,
            "encoder_hidden_states": normal(2, TEXT, 16),
            "text_embedding_mask": torch.ones(2, TEXT),
            "encoder_hidden_states_t5": normal(2, TEXT, 16, seed=2),
            "text_embedding_mask_t5": torch.ones(2, TEXT),
            "image_meta_size": torch.ones(2, 6),
            "style": torch.zeros(2, dtype=torch.long),
            "image_rotary_emb": (normal(H * W, 16), normal(H * W, 16, seed=2)),
            **STEP,
        },
        {96: 4},
        note="keys merge after rotation",
    ),
    row(
        "Lumina-Next",
        model(
            "LuminaNextDiT2DModel",
            sample_size=32,
            patch_size=2,
            in_channels=4,
            hidden_size=32,
            num_layers=2,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=16,
            cross_attention_dim=16,
        ),
        {
            "hidden_states": IMAGE,
            "encoder_hidden_states": normal(2, TEXT, 16),
            "encoder_mask": torch.ones(2, TEXT),
            "image_rotary_emb": torch.polar(torch.ones(32, 32, 8), normal(32, 32, 8)),
            "cross_attention_kwargs": {"base_sequence_length": 64},
            "timestep": torch.tensor([0.5, 0.5]),
        },
        {96: 2},
        processor="none",
        note="keys merge after rotation",
    ),
    row(
        "Stable Diffusion 3",
        model(
            "SD3Transformer2DModel",
            **PATCHED,
            **HEADS,
            joint_attention_dim=16,
            caption_projection_dim=32,
            pooled_projection_dim=8,
            out_channels=4,
        ),
        {
            "hidden_states": IMAGE,
            "encoder_hidden_states": normal(2, TEXT, 16),
            "pooled_projections": normal(2, 8),
            **STEP,
        },
        {96: 2},
        note="text never merges",
    ),
    row(
        "Stable Diffusion 3.5",
        model(
            "SD3Transformer2DModel",
            **PATCHED,
            **HEADS,
            joint_attention_dim=16,
            caption_projection_dim=32,
            pooled_projection_dim=8,
            out_channels=4,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
        {
            "hidden_states": IMAGE,
            "encoder_hidden_states": normal(2, TEXT, 16),
            "pooled_projections": normal(2, 8),
            **STEP,
        },
        {96: 3},
        note="its second attention merges too",
    ),
    row(
        "Flux",
        model("FluxTransformer2DModel", **FLUX, pooled_projection_dim=8),
        {**flux_inputs(), "pooled_projections": normal(2, 8), "timestep": torch.tensor([0.5, 0.5])},
        {96: 4},
        note="double and single blocks; text never merges; keys merge after rotation",
    ),
    row(
        "Flux Kontext",
        model("FluxTransformer2DModel", **FLUX, pooled_projection_dim=8),
        {
            **reference_image(),
            "pooled_projections": normal(2, 8),
            "timestep": torch.tensor([0.5, 0.5]),
        },
        {96: 4},
        note="the reference image's tokens stay as they are",
    ),
    row(
        "Flux Kontext, `references=0.5`",
        model("FluxTransformer2DModel", **FLUX, pooled_projection_dim=8),
        {
            **reference_image(6),
            "pooled_projections": normal(2, 8),
            "timestep": torch.tensor([0.5, 0.5]),
        },
        {120: 4},
        modes={"kv": {"keep": 0.5, "references": 0.5}},
        processor="set",
        one_liner="error",
        note="the reference image merges on its own grid",
    ),
    row(
        "Chroma",
        model(
            "ChromaTransformer2DModel",
            **FLUX,
            approximator_num_channels=64,
            approximator_hidden_dim=16,
            approximator_layers=1,
        ),
        {
            **flux_inputs(),
            "attention_mask": torch.cat(
                [
                    torch.tensor([[True] * 5 + [False] * 2] * 2),
                    torch.ones(2, H * W, dtype=torch.bool),
                ],
                1,
            ),
            "timestep": torch.tensor([0.5, 0.5]),
        },
        {96: 4},
        note="its mask is selected too",
    ),
    row(
        "Qwen-Image",
        model(
            "QwenImageTransformer2DModel",
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            **HEADS,
            joint_attention_dim=16,
            axes_dims_rope=(4, 4, 8),
        ),
        {
            "hidden_states": normal(2, H * W, 16),
            "encoder_hidden_states": normal(2, TEXT, 16),
            "encoder_hidden_states_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2]),
            "img_shapes": [[(1, H, W)]] * 2,
            "timestep": torch.tensor([0.5, 0.5]),
        },
        {96: 2},
        note="text never merges; keys merge after rotation",
    ),
    row(
        "AuraFlow",
        model(
            "AuraFlowTransformer2DModel",
            sample_size=32,
            patch_size=2,
            in_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            **HEADS,
            joint_attention_dim=16,
            caption_projection_dim=32,
            out_channels=4,
            pos_embed_max_size=256,
        ),
        {
            "hidden_states": IMAGE,
            "encoder_hidden_states": normal(2, TEXT, 16),
            "timestep": torch.tensor([0.5, 0.5]),
        },
        {96: 2},
        note="text and register tokens never merge",
    ),
    row(
        "Wan (video)",
        WAN,
        {
            "hidden_states": normal(2, 4, 3, 2 * H, 2 * W),
            "encoder_hidden_states": normal(2, TEXT, 16),
            **STEP,
        },
        {288: 2},
        note="tiles over time and space; keys merge after rotation",
    ),
    row(
        "LTX-Video",
        model(
            "LTXVideoTransformer3DModel",
            in_channels=4,
            out_channels=4,
            **HEADS,
            cross_attention_dim=32,
            num_layers=2,
            caption_channels=16,
        ),
        {
            "hidden_states": normal(2, 3 * H * W, 4),
            "encoder_hidden_states": normal(2, TEXT, 16),
            "encoder_attention_mask": torch.ones(2, TEXT),
            "num_frames": 3,
            "height": H,
            "width": W,
            **STEP,
        },
        {288: 2},
        note="tiles over time and space; keys merge after rotation",
    ),
    row(
        "CogVideoX",
        model(
            "CogVideoXTransformer3DModel",
            **HEADS,
            in_channels=4,
            out_channels=4,
            time_embed_dim=8,
            text_embed_dim=16,
            num_layers=2,
            sample_width=2 * W,
            sample_height=2 * H,
            sample_frames=9,
            max_text_seq_length=TEXT,
            use_rotary_positional_embeddings=True,
        ),
        {
            "hidden_states": normal(2, 3, 4, 2 * H, 2 * W),
            "encoder_hidden_states": normal(2, TEXT, 16),
            "image_rotary_emb": (normal(3 * H * W, 16), normal(3 * H * W, 16, seed=2)),
            **STEP,
        },
        {288: 2},
        note="tiles over time and space; text never merges; keys merge after rotation",
    ),
    row(
        "Sana",
        model(
            "SanaTransformer2DModel",
            in_channels=4,
            out_channels=4,
            num_layers=1,
            **HEADS,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=16,
            sample_size=16,
        ),
        {"hidden_states": IMAGE, "encoder_hidden_states": normal(2, TEXT, 16), **STEP},
        {},
        processor="set",
        one_liner="never: it cannot see that it replaces linear attention",
        refused="linear in the tokens already",
        note="refused: its attention is linear already",
    ),
]
