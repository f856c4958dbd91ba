"""Models that are refused since their attention is linear, or over blocks of keys."""

from __future__ import annotations

import torch

from tests.builders.transformers import HEADS, IMAGE, normal
from tests.matrix.models.case import VIDEO, T, case
from tests.matrix.models.videos import WAN, frames_first

SANA = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    **HEADS,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 16,
}

LINEAR = [
    case("SanaTransformer2DModel", **SANA, sample_size=16),
    case("SanaControlNetModel", lambda: {"controlnet_cond": IMAGE}, **SANA, sample_size=16),
    case(
        "SanaVideoTransformer3DModel",
        lambda: {"hidden_states": VIDEO},
        **SANA,
        sample_size=16,
        rope_max_seq_len=32,
    ),
]
SPARSE = [
    case(
        "AnyFlowFARTransformer3DModel",
        lambda: {
            "hidden_states": frames_first(VIDEO),
            "timestep": torch.full((2, T), 500.0),
            "r_timestep": torch.full((2, T), 250.0),
            "chunk_partition": [1, 2],
        },
        **WAN,
    ),
    case(
        "Kandinsky6SRTransformer3DModel",
        lambda: {"hidden_states": normal(1, 2, 16, 16, 9), "timestep": torch.tensor([500.0])},
        nabla_window=(3, 3, 3),
    ),
]
