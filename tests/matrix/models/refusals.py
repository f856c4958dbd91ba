"""Models that are refused since their attention is linear, or over blocks of keys."""

from __future__ import annotations

import torch

from tests.builders.transformers import normal
from tests.matrix.models.case import case
from tests.matrix.models.videos import BCTHW, frame_times

SANA = {"num_layers": 1, "sample_size": 16}

LINEAR = [
    case("SanaTransformer2DModel", **SANA),
    case("SanaControlNetModel", **SANA),
    case("SanaVideoTransformer3DModel", image=BCTHW, **SANA, rope_max_seq_len=32),
]
SPARSE = [
    case(
        "AnyFlowFARTransformer3DModel",
        lambda: {**frame_times(), "chunk_partition": [1, 2]},
        "hidden_states BTCHW",
    ),
    case(
        "Kandinsky6SRTransformer3DModel",
        lambda: {"hidden_states": normal(1, 2, 16, 16, 9), "timestep": torch.tensor([500.0])},
        nabla_window=(3, 3, 3),
    ),
]
