"""The models and rows of `benchmarks.gpu`: published architectures at their own sizes, and what is
put on them. With a token budget, what merging costs and saves does not depend on the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from benchmarks.attention import without_bias
from mame_sd import mame

On = Callable[[Any], AbstractContextManager[Any]]
HALF, BRAIN = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A model at one size, and what it is called with.

    Attributes:
        model: diffusers' class.
        config: of the model.
        shapes: of the call's tensors by name, without the batch.
        dtype: of weights and inputs.
        batch: samples; 2 is one guided image.
        repeats: blocks that stand for as many, by their path: transformers are cut in depth.
        ids: further arguments whose values are read, as they are.
    """

    model: str
    config: Mapping[str, Any]
    shapes: Mapping[str, Any]
    dtype: torch.dtype = BRAIN
    batch: int = 1
    repeats: Mapping[str, int] = field(default_factory=dict)
    ids: Mapping[str, Tensor] = field(default_factory=dict)

    def build(self, device: torch.device) -> nn.Module:
        """Make the model with seeded random weights, in `dtype` on `device`."""
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with device:
                model: nn.Module = getattr(diffusers, self.model).from_config(dict(self.config))
                # without diffusers' notice of what it would rather keep in fp32
                return nn.Module.to(model.eval(), self.dtype)
        finally:
            torch.set_default_dtype(before)

    def inputs(self, model: nn.Module) -> tuple[dict[str, Any], dict[int, Tensor]]:
        """Make the arguments of a call on the model's device: zeros, and `ids` with their values by
        the tensors' id.
        """
        device = next(model.parameters()).device

        def made(shape: Any) -> Any:
            if isinstance(shape, Mapping):
                return {name: made(part) for name, part in shape.items()}
            return torch.zeros(self.batch, *shape, device=device, dtype=self.dtype)

        ids = {name: value.to(device) for name, value in self.ids.items()}
        known = {id(ids[name]): value for name, value in self.ids.items()}
        return {**made(self.shapes), **ids}, known


# unet/config.json of stable-diffusion-v1-5 and of stable-diffusion-xl-base-1.0, where it differs
# from diffusers' defaults
SD15: dict[str, Any] = {"cross_attention_dim": 768}
SDXL: dict[str, Any] = {
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "cross_attention_dim": 2048,
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


def unet(config: Mapping[str, Any], side: int, dtype: torch.dtype = HALF, **changed: Any) -> Case:
    """A UNet of `config` and what is `changed`, for one guided image of `side` pixels."""
    config = {**config, **changed}
    shapes: dict[str, Any] = {
        "sample": (config.get("in_channels", 4), side // 8, side // 8),
        "timestep": (),
        "encoder_hidden_states": (77, config["cross_attention_dim"]),
    }
    if config.get("addition_embed_type"):
        shapes["added_cond_kwargs"] = {"text_embeds": (1280,), "time_ids": (6,)}
    return Case("UNet2DConditionModel", config, shapes, dtype, batch=2)


def flux(
    size: tuple[int, int],
    heads: int = 24,
    text: int = 512,
    layers: tuple[int, int] = (2, 2),
    **more: Any,
) -> Case:
    """FLUX.1 with an image of (h, w) tokens: the second of its `layers` stands for all but one of
    19 double blocks and of 38 single ones.
    """
    h, w = size
    ids = torch.zeros(h, w, 3)
    ids[..., 1], ids[..., 2] = torch.arange(h).unsqueeze(1), torch.arange(w)
    shapes = {
        "hidden_states": (h * w, 64),
        "encoder_hidden_states": (text, 4096),
        "pooled_projections": (768,),
        "timestep": (),
    }
    return Case(
        "FluxTransformer2DModel",
        {"num_layers": layers[0], "num_single_layers": layers[1], "num_attention_heads": heads},
        shapes,
        repeats={"transformer_blocks.1": 18, "single_transformer_blocks.1": 37},
        ids={"img_ids": ids.flatten(0, 1), "txt_ids": torch.zeros(text, 3)},
        **more,
    )


def sd3(
    size: tuple[int, int], heads: int = 38, text: int = 333, layers: int = 3, **more: Any
) -> Case:
    """SD 3.5 large with a guided image of (h, w) tokens: the second of three blocks stands for 36
    of 38, and the last one gives no text.
    """
    config = {
        "num_layers": layers,
        "num_attention_heads": heads,
        "caption_projection_dim": 64 * heads,
        "qk_norm": "rms_norm",
        "pos_embed_max_size": 192,
    }
    shapes = {
        "hidden_states": (16, 2 * size[0], 2 * size[1]),
        "encoder_hidden_states": (text, 4096),
        "pooled_projections": (2048,),
        "timestep": (),
    }
    repeats = {"transformer_blocks.1": 36}
    return Case("SD3Transformer2DModel", config, shapes, batch=2, repeats=repeats, **more)


def wan(
    size: tuple[int, int, int],
    heads: int = 40,
    text: int = 512,
    layers: int = 2,
    ffn_dim: int = 13824,
    repeats: int = 39,
    **more: Any,
) -> Case:
    """Wan of 14 B with a video of (t, h, w) tokens: the second of its `layers` stands for
    `repeats`.
    """
    t, h, w = size
    config = {"num_layers": layers, "num_attention_heads": heads, "ffn_dim": ffn_dim}
    shapes = {
        "hidden_states": (16, t, 2 * h, 2 * w),
        "encoder_hidden_states": (text, 4096),
        "timestep": (),
    }
    return Case("WanTransformer3DModel", config, shapes, repeats={"blocks.1": repeats}, **more)


# What makes each case; it takes other sizes too.
CASES: dict[str, partial[Case]] = {
    "SD 1.5 at 512": partial(unet, SD15, side=512),
    "SD 1.5 at 1024": partial(unet, SD15, side=1024),
    "SDXL at 1024": partial(unet, SDXL, side=1024),
    "SD 3.5 large at 1024": partial(sd3, size=(64, 64)),
    "FLUX.1 at 1024": partial(flux, size=(64, 64)),
    "FLUX.1 at 2048": partial(flux, size=(128, 128)),
    "Wan 2.1 14B, 480p": partial(wan, size=(21, 30, 52)),
    "Wan 2.2 14B, 720p": partial(wan, size=(21, 45, 80)),
}


def rows_of(min_tokens: int) -> dict[str, On]:
    """What is reckoned of a case, by the row's name.

    Args:
        min_tokens: from how many tokens on layers merge in the rows of the default.
    """
    # How many tokens tau keeps depends on the picture, so no row has it.
    default = partial(mame, keep=0.25, min_tokens=min_tokens)
    return {
        "unmerged": lambda model: nullcontext(),
        "default": default,
        "default, kernel without bias": partial(default, kernel=without_bias),
        "keys, a quarter": partial(mame, keep=0.25, min_tokens=1024),
    }
