"""diffusers' transformers at tiny size, and their inputs: a text, and images of 8 x 12 tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from tests.builders.tiny import seeded

H, W, TEXT = 8, 12, 7  # tokens of the image, and of the text
STEP = {"timestep": torch.tensor([500.0, 500.0])}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model(name: str, **config: Any) -> Callable[[], nn.Module]:
    """Build diffusers' class of that name, and draw parameters that are made as zero or empty."""

    def build() -> nn.Module:
        module = seeded(getattr(diffusers, name), 0, **config)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for key, parameter in module.named_parameters():
                blank = (
                    key.endswith(("gate", "pad_token", "register_tokens")) or not parameter.any()
                )
                if parameter.dim() > 0 and blank and not key.endswith("bias"):
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        return module

    return build


def run(inputs: dict[str, Any], transformer: Any) -> Tensor:
    with torch.no_grad():
        output = transformer(**inputs, return_dict=False)[0]
    return output if isinstance(output, Tensor) else torch.stack(list(output))


def flux_inputs() -> dict[str, Any]:
    rows = torch.arange(H).repeat_interleave(W)
    ids = torch.stack([torch.zeros(H * W, dtype=torch.long), rows, torch.arange(W).repeat(H)], 1)
    return {
        "hidden_states": normal(2, H * W, 4),
        "encoder_hidden_states": normal(2, TEXT, 16),
        "img_ids": ids.float(),
        "txt_ids": torch.zeros(TEXT, 3),
    }


IMAGE = normal(2, 4, 2 * H, 2 * W)
