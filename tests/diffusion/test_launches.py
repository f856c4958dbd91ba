"""What merging asks of a card: kernels launched and bytes moved by one layer, counted on tensors
that have sizes alone.

The budgets are pinned. Where one is exceeded the message says which calls there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel, UNet2DConditionModel
from torch import nn

from benchmarks.launches import counted, on_card, pretended
from mame_sd import apply_mame
from mame_sd.core.cards import Work
from tests.builders.settings import nested

HALF = {"dtype": torch.float16, "device": "meta"}


def unet() -> tuple[nn.Module, dict[str, Any], str]:
    """The largest level of SD 1.5 at 512, its inputs, and one of its self-attentions."""
    with torch.device("meta"):
        model = UNet2DConditionModel(
            sample_size=64,
            block_out_channels=(320,),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D",),
            up_block_types=("CrossAttnUpBlock2D",),
            mid_block_type=None,
            cross_attention_dim=768,
            attention_head_dim=8,
        ).half()
    inputs = {
        "sample": torch.empty(2, 4, 64, 64, **HALF),
        "timestep": torch.empty(2, device="meta"),
        "encoder_hidden_states": torch.empty(2, 77, 768, **HALF),
    }
    return model, inputs, "down_blocks.0.attentions.0.transformer_blocks.0.attn1"


def sd3() -> tuple[nn.Module, dict[str, Any], str]:
    """A block of SD 3.5 medium at 1024."""
    with torch.device("meta"):
        model = SD3Transformer2DModel(
            num_layers=2,
            num_attention_heads=24,
            caption_projection_dim=1536,
            pos_embed_max_size=192,
            qk_norm="rms_norm",
        ).half()
    inputs = {
        "hidden_states": torch.empty(2, 16, 128, 128, **HALF),
        "timestep": torch.empty(2, device="meta"),
        "encoder_hidden_states": torch.empty(2, 333, 4096, **HALF),
        "pooled_projections": torch.empty(2, 2048, **HALF),
    }
    return model, inputs, "transformer_blocks.0.attn"


def work_of(
    build: Callable[[], Any], fields: dict[str, Any] | None, kernels: bool = True
) -> list[Work]:
    """What a card is asked in one layer's second call, unmerged where there are no `fields`."""
    found: list[list[Work]] = []
    with pretended(kernels=kernels):
        model, inputs, path = build()
        model = on_card(model)
        if fields is not None:
            apply_mame(model, **nested(fields))
        model(**inputs)
        layer: Any = model.get_submodule(path)
        forward = layer.forward

        def counting(*args: Any, **kwargs: Any) -> Any:
            output: list[Any] = []
            found.append(counted(lambda: output.append(forward(*args, **kwargs))))
            return output[0]

        layer.forward = counting
        model(**inputs)
    return found[0]


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "PyTorch"])
@pytest.mark.parametrize(
    ("build", "fields", "budget", "without"),
    [
        (unet, {}, 5, 35),
        (unet, {"keep": 0.5, "merge": "qkv"}, 10, 70),
        (unet, {"weights": "pick", "correct": False}, 3, 3),
        (sd3, {"keep": 0.25, "merge": "kv"}, 6, 32),
        (sd3, {}, 12, 69),
        (sd3, {"weights": "pick", "correct": False}, 8, 8),
    ],
    ids=["UNet", "UNet-qkv", "UNet-picks", "SD3-keys", "SD3", "SD3-picks"],
)
def test_launches_and_bytes_stay_within_their_budgets(
    build: Any,
    fields: dict[str, Any],
    budget: int,
    without: int,
    kernels: bool,
) -> None:
    pytest.importorskip("triton")
    plain, merged = work_of(build, None), work_of(build, fields, kernels)
    more = Counter({work.name: 0 for work in merged})
    for sign, works in ((1, merged), (-1, plain)):
        for work in works:
            more[work.name] += sign * work.launches
    added = {name: count for name, count in more.items() if count}
    assert any(work.name == "attention" for work in merged)
    assert (("nearest" in added) == kernels) or fields.get("weights") == "pick"
    assert sum(added.values()) <= (budget if kernels else without), added
    if kernels:
        attention = sum(work.bytes for work in plain if work.name == "attention")
        moved = sum(work.bytes for work in merged) - sum(work.bytes for work in plain)
        assert moved <= 2 * attention, f"{moved / 1e6:.0f} MB, attention {attention / 1e6:.0f} MB"
