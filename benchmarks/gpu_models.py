"""The models and rows of `benchmarks.gpu`: published architectures at their own sizes, and what is
put on them.
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

from benchmarks import methods, unets
from mame_sd import mame
from mame_sd.eval.benchmark.tomesd import tomesd_on

On = Callable[[Any], AbstractContextManager[Any]]
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Shape:
    """One layer of a published model.

    Attributes:
        model: diffusers' class.
        config: its configuration but for the number of heads, which `heads` is.
        size: (h, w) of an image's tokens or (t, h, w) of a video's.
        text: tokens of text.
        inputs: makes a call's arguments, but for what all have.
        width: configuration that follows from the width of a token.
    """

    model: str
    config: Mapping[str, Any]
    heads: int
    head: int
    size: tuple[int, ...]
    text: int
    inputs: Callable[[Shape], dict[str, Any]]
    width: Callable[[int], dict[str, Any]] = lambda width: {}

    @property
    def dim(self) -> int:
        return self.heads * self.head

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The model, seeded random weights, made in `dtype` on `device`."""
        config = {
            **self.config,
            "num_attention_heads": self.heads,
            "attention_head_dim": self.head,
            **self.width(self.dim),
        }
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                model: nn.Module = getattr(diffusers, self.model)(**config).eval()
        finally:
            torch.set_default_dtype(before)
        return model.to(dtype)


def _flux(shape: Shape) -> dict[str, Any]:
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


def _sd3(shape: Shape) -> dict[str, Any]:
    h, w = shape.size
    return {
        "hidden_states": torch.zeros(1, 16, 2 * h, 2 * w),
        "encoder_hidden_states": torch.zeros(1, shape.text, 4096),
        "pooled_projections": torch.zeros(1, 2048),
    }


def _wan(shape: Shape) -> dict[str, Any]:
    t, h, w = shape.size
    return {
        "hidden_states": torch.zeros(1, 16, t, 2 * h, 2 * w),
        "encoder_hidden_states": torch.zeros(1, shape.text, 4096),
    }


# transformer/config.json of the models named, cut to the blocks that are needed
_SD35 = Shape(
    "SD3Transformer2DModel",
    {
        "sample_size": 128,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 2,  # the last block gives no text
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 2048,
        "qk_norm": "rms_norm",
        "pos_embed_max_size": 192,
    },
    38,
    64,
    (64, 64),
    333,
    _sd3,
    width=lambda width: {"caption_projection_dim": width},
)
_AXES = (16, 56, 56)  # rotary positions of heads of 128
SHAPES = {
    "flux": Shape(
        "FluxTransformer2DModel",
        {"num_layers": 1, "num_single_layers": 0, "axes_dims_rope": _AXES},
        24,
        128,
        (64, 64),
        512,
        _flux,
    ),
    "sd3.5-large": _SD35,
    "wan": Shape(
        "WanTransformer3DModel",
        {"num_layers": 1, "ffn_dim": 8960},
        12,
        128,
        (21, 30, 52),
        512,
        _wan,
    ),
}


@dataclass(frozen=True)
class Case:
    """A model at one size.

    Attributes:
        model: its name in `benchmarks.unets`, or one of SHAPES.
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
        """The model with random weights."""
        if isinstance(self.model, str):
            return unets.build(self.model, device, self.dtype)
        return self.model.build(device, self.dtype)

    def inputs(self, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, Tensor]]:
        """Arguments of a call on the model's device, and the values of those whose values are read,
        by id.
        """
        if isinstance(self.model, str):
            named = unets.inputs(model, self.side, self.batch, 0)
            return (named.pop("sample"), named.pop("timestep")), named, {}
        device = next(model.parameters()).device
        known, named = {}, {}
        for name, value in {**self.model.inputs(self.model), "timestep": torch.ones(1)}.items():
            if not isinstance(value, Tensor):
                named[name] = value
                continue
            moved = value if "ids" in name else value.expand(self.batch, *value.shape[1:])
            moved = moved.to(
                device, self.dtype if value.is_floating_point() and "ids" not in name else None
            )
            known[id(moved)] = value
            named[name] = moved
        return (), named, known


_FLUX = SHAPES["flux"]
_WAN = SHAPES["wan"]


def _cut(shape: Shape, cut: dict[str, int], batch: int = 1, **repeats: int) -> Case:
    """A transformer with a few blocks, as `cut` says, whose second one stands for as many as
    `repeats` says.
    """
    shape = replace(shape, config={**shape.config, **cut})
    return Case(
        shape,
        batch=batch,
        dtype=BRAIN,
        repeats=tuple((f"{name}.1", n) for name, n in repeats.items()),
    )


CASES: dict[str, Case] = {
    **{f"SD 1.5 at {side}": Case("sd1.5", side) for side in (512, 1024)},
    "SDXL at 1024": Case("sdxl", 1024),
    "SD 3.5 large at 1024": _cut(_SD35, {"num_layers": 3}, 2, transformer_blocks=36),
    "FLUX.1 at 1024": _cut(
        _FLUX,
        {"num_layers": 2, "num_single_layers": 2},
        transformer_blocks=18,
        single_transformer_blocks=37,
    ),
    "FLUX.1 at 2048": _cut(
        replace(_FLUX, size=(128, 128)),
        {"num_layers": 2, "num_single_layers": 2},
        transformer_blocks=18,
        single_transformer_blocks=37,
    ),
    "Wan 2.1 14B, 480p": _cut(
        replace(_WAN, heads=40), {"num_layers": 2, "ffn_dim": 13824}, blocks=39
    ),
    "Wan 2.2 14B, 720p": _cut(
        replace(_WAN, heads=40, size=(21, 45, 80)), {"num_layers": 2, "ffn_dim": 13824}, blocks=39
    ),
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
    return {
        "unmerged": lambda model: nullcontext(),
        "default": lambda model: mame(model, keep=0.25, min_tokens=min_tokens),
        "default, kernel without bias": lambda model: mame(
            model, keep=0.25, min_tokens=min_tokens, kernel=methods.without_bias
        ),
        **{name: partial(_at_share, keep) for name, keep in SHARES.items()},
        **({"tomesd, half": partial(tomesd_row, 0.5)} if case.is_unet else {}),
    }


def _at_share(keep: float, model: Any) -> AbstractContextManager[Any]:
    return mame(model, keep=keep, min_tokens=1024)
