"""The models and rows of `benchmarks.gpu`: published architectures at their own sizes, and what is
put on them. With a token budget, what merging costs and saves does not depend on the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import diffusers
import torch
from torch import Tensor, nn

from benchmarks.attention import without_bias
from mame_sd import mame
from mame_sd.eval.rivals.tomesd import tomesd_on

On = Callable[[Any], AbstractContextManager[Any]]
HALF, BRAIN = torch.float16, torch.bfloat16

_UNET: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 2,
    "act_fn": "silu",
    "norm_num_groups": 32,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
}
# unet/config.json of stable-diffusion-v1-5 and of stable-diffusion-xl-base-1.0
UNETS: dict[str, dict[str, Any]] = {
    "sd1.5": {
        **_UNET,
        "sample_size": 64,
        "block_out_channels": (320, 640, 1280, 1280),
        "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        "cross_attention_dim": 768,
        "attention_head_dim": 8,
    },
    "sdxl": {
        **_UNET,
        "sample_size": 128,
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
    },
}
TEXT_TOKENS, POOLED_TEXT = 77, 1280


def _unet(model: nn.Module, side: int, batch: int) -> dict[str, Tensor | dict[str, Tensor]]:
    """Random arguments of one forward of a UNet for images of `side` pixels."""
    weight = next(model.parameters())
    config: Any = model.config

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, device=weight.device, dtype=weight.dtype)

    found: dict[str, Tensor | dict[str, Tensor]] = {
        "sample": noise(batch, 4, side // 8, side // 8),
        "timestep": torch.tensor(500, device=weight.device),
        "encoder_hidden_states": noise(batch, TEXT_TOKENS, config["cross_attention_dim"]),
    }
    if config["addition_embed_type"] == "text_time":
        sizes = weight.new_tensor([[side, side, 0, 0, side, side]] * batch)
        found["added_cond_kwargs"] = {"text_embeds": noise(batch, POOLED_TEXT), "time_ids": sizes}
    return found


@dataclass(frozen=True)
class Shape:
    """One transformer of a published model.

    Attributes:
        model: diffusers' class.
        config: its configuration but for heads and what follows from them.
        size: (h, w) of an image's tokens or (t, h, w) of a video's.
        text: tokens of text.
        inputs: makes a call's arguments, but for what all have.
    """

    model: str
    config: Mapping[str, Any]
    heads: int
    head: int
    size: tuple[int, ...]
    text: int
    inputs: Callable[[Shape], dict[str, Tensor]]

    def made(self) -> nn.Module:
        heads = {"num_attention_heads": self.heads, "attention_head_dim": self.head}
        if "joint_attention_dim" in self.config:
            heads["caption_projection_dim"] = self.heads * self.head
        made: nn.Module = getattr(diffusers, self.model)(**self.config, **heads)
        return made


def _flux(shape: Shape) -> dict[str, Tensor]:
    h, w = shape.size
    ids = torch.zeros(h, w, 3)
    ids[..., 1], ids[..., 2] = torch.arange(h).unsqueeze(1), torch.arange(w)
    return {
        "hidden_states": torch.zeros(1, h * w, 64),
        "img_ids": ids.flatten(0, 1),
        "txt_ids": torch.zeros(shape.text, 3),
        "encoder_hidden_states": torch.zeros(1, shape.text, 4096),
        "pooled_projections": torch.zeros(1, 768),
    }


def _sd3(shape: Shape) -> dict[str, Tensor]:
    h, w = shape.size
    return {
        "hidden_states": torch.zeros(1, 16, 2 * h, 2 * w),
        "encoder_hidden_states": torch.zeros(1, shape.text, 4096),
        "pooled_projections": torch.zeros(1, 2048),
    }


def _wan(shape: Shape) -> dict[str, Tensor]:
    t, h, w = shape.size
    return {
        "hidden_states": torch.zeros(1, 16, t, 2 * h, 2 * w),
        "encoder_hidden_states": torch.zeros(1, shape.text, 4096),
    }


# transformer/config.json of the models named, cut to the blocks that are needed
_SD3_CONFIG = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 2,  # the last block gives no text
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
    "qk_norm": "rms_norm",
    "pos_embed_max_size": 192,
}
_FLUX_CONFIG = {
    "num_layers": 1,
    "num_single_layers": 0,
    "axes_dims_rope": (16, 56, 56),  # rotary positions of heads of 128
}
_WAN_CONFIG = {"num_layers": 1, "ffn_dim": 8960}
SHAPES = {
    "flux": Shape("FluxTransformer2DModel", _FLUX_CONFIG, 24, 128, (64, 64), 512, _flux),
    "sd3.5-large": Shape("SD3Transformer2DModel", _SD3_CONFIG, 38, 64, (64, 64), 333, _sd3),
    "wan": Shape("WanTransformer3DModel", _WAN_CONFIG, 12, 128, (21, 30, 52), 512, _wan),
}


@dataclass(frozen=True)
class Case:
    """A model at one size.

    Attributes:
        model: one of UNETS by its name, or of SHAPES.
        side: pixels of a UNet's image.
        batch: samples; 2 is one guided image.
        dtype: of weights and inputs.
        repeats: blocks that stand for as many, by their path: models are cut in depth.
    """

    model: str | Shape
    side: int = 0
    batch: int = 2
    dtype: torch.dtype = HALF
    repeats: tuple[tuple[str, int], ...] = ()

    @property
    def is_unet(self) -> bool:
        return isinstance(self.model, str)

    def build(self, device: torch.device) -> nn.Module:
        """The model with seeded random weights, made in `dtype` on `device`."""
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with device:
                if isinstance(self.model, Shape):
                    return self.model.made().eval().to(self.dtype)
                return diffusers.UNet2DConditionModel.from_config(UNETS[self.model]).eval()
        finally:
            torch.set_default_dtype(before)

    def inputs(self, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, Tensor]]:
        """Arguments of a call on the model's device, and the values of those whose values are read,
        by id.
        """
        named: dict[str, Any]
        if isinstance(self.model, str):
            named = _unet(model, self.side, self.batch)
            return (named.pop("sample"), named.pop("timestep")), named, {}
        device = next(model.parameters()).device
        known, named = {}, {}
        for name, value in {**self.model.inputs(self.model), "timestep": torch.ones(1)}.items():
            if "ids" in name:
                moved = value.to(device)
            else:
                moved = value.expand(self.batch, *value.shape[1:]).to(device, self.dtype)
            known[id(moved)] = value
            named[name] = moved
        return (), named, known


def _cut(shape: Shape, cut: dict[str, int], batch: int = 1, **repeats: int) -> Case:
    """A transformer with a few blocks, as `cut` says, whose second one stands for as many as
    `repeats` says.
    """
    shape = replace(shape, config={**shape.config, **cut})
    paths = tuple((f"{name}.1", n) for name, n in repeats.items())
    return Case(shape, batch=batch, dtype=BRAIN, repeats=paths)


def _flux_at(side: int) -> Case:
    """FLUX.1 with an image of `side` x `side` tokens."""
    return _cut(
        replace(SHAPES["flux"], size=(side, side)),
        {"num_layers": 2, "num_single_layers": 2},
        transformer_blocks=18,
        single_transformer_blocks=37,
    )


def _wan_at(size: tuple[int, int, int]) -> Case:
    """Wan of 14 B with a video of `size` tokens."""
    return _cut(
        replace(SHAPES["wan"], heads=40, size=size),
        {"num_layers": 2, "ffn_dim": 13824},
        blocks=39,
    )


CASES: dict[str, Case] = {
    **{f"SD 1.5 at {side}": Case("sd1.5", side) for side in (512, 1024)},
    "SDXL at 1024": Case("sdxl", 1024),
    "SD 3.5 large at 1024": _cut(
        SHAPES["sd3.5-large"], {"num_layers": 3}, 2, transformer_blocks=36
    ),
    "FLUX.1 at 1024": _flux_at(64),
    "FLUX.1 at 2048": _flux_at(128),
    "Wan 2.1 14B, 480p": _wan_at((21, 30, 52)),
    "Wan 2.2 14B, 720p": _wan_at((21, 45, 80)),
}


@contextmanager
def tomesd_row(ratio: float, model: Any) -> Iterator[None]:
    """tomesd's patch, which draws on the CPU where the card is pretended."""

    def on_cpu(device: torch.device, fallback: torch.Generator | None = None) -> torch.Generator:
        return torch.Generator() if fallback is None else fallback

    pretending = next(model.parameters()).is_meta
    with (
        mock.patch("tomesd.patch.init_generator", on_cpu) if pretending else nullcontext(),
        tomesd_on(model, ratio),
    ):
        yield


SHARES = {"keys, half": 0.5, "keys, a quarter": 0.25, "keys, an eighth": 0.125}


def rows_of(case: Case, min_tokens: int) -> Mapping[str, On]:
    """What is reckoned of a case, by the row's name.

    Args:
        min_tokens: from how many tokens on layers merge in the row of the default.
    """
    # How many tokens tau keeps depends on the picture, so no row has it.
    default = partial(mame, keep=0.25, min_tokens=min_tokens)
    return {
        "unmerged": lambda model: nullcontext(),
        "default": default,
        "default, kernel without bias": partial(default, kernel=without_bias),
        **{name: partial(mame, keep=keep, min_tokens=1024) for name, keep in SHARES.items()},
        **({"tomesd, half": partial(tomesd_row, 0.5)} if case.is_unet else {}),
    }
