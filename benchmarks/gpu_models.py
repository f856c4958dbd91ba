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

import torch
from diffusers.models.attention_processor import AttnProcessor
from torch import Tensor, nn

from benchmarks import methods, shapes, unets
from benchmarks.free import free_on
from benchmarks.tomesd import tomesd_on
from mame_sd import MaMeConfig, mame

On = Callable[[Any], AbstractContextManager[Any]]
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """A model at one size.

    Attributes:
        model: its name in `benchmarks.unets`, or a shape of `benchmarks.shapes`.
        side: pixels of a UNet's image.
        batch: samples; 2 is one guided image.
        dtype: of weights and inputs.
        repeats: blocks that stand for as many, by their path: models are cut in depth.
    """

    model: str | shapes.Shape
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


_SD35 = shapes.SHAPES["sd3.5-large"]
_FLUX = shapes.SHAPES["flux"]
_WAN = shapes.SHAPES["wan"]
_VIDEO = "81 frames at 480p"


def _cut(shape: shapes.Shape, cut: dict[str, int], batch: int = 1, **repeats: int) -> Case:
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
    **{f"SD 1.5 at {side}": Case("sd1.5", side) for side in (512, 768, 1024)},
    **{f"SD 2.1 at {side}": Case("sd2.1", side) for side in (512, 768, 1024)},
    "SD 2.1 at 768, fp32": Case("sd2.1", 768, dtype=SINGLE),
    "SDXL at 1024": Case("sdxl", 1024),
    "SD 3.5 large at 1024": _cut(_SD35, {"num_layers": 3}, 2, transformer_blocks=36),
    "FLUX.1 at 1024": _cut(
        _FLUX,
        {"num_layers": 2, "num_single_layers": 2},
        transformer_blocks=18,
        single_transformer_blocks=37,
    ),
    f"Wan 2.1 1.3B, {_VIDEO}": _cut(_WAN, {"num_layers": 2}, blocks=29),
    f"Wan 2.1 14B, {_VIDEO}": _cut(
        replace(_WAN, heads=40), {"num_layers": 2, "ffn_dim": 13824}, blocks=39
    ),
}
# What each row puts on a model. Counts of tokens that tau keeps depend on the picture, so rows of
# tau are not reckoned.
_OURS: dict[str, On] = {
    "unmerged": nullcontext,
    "default": mame,
    "keys, a quarter": methods.ours(keep=0.25).on,
    "keys, a quarter, not corrected": methods.ours(keep=0.25, correct=False).on,
    "keys, half (nearer)": methods.ours(keep=0.5).on,
    "keys, an eighth": methods.ours(keep=0.125).on,
    "keys, a sixteenth (faster)": methods.ours(keep=0.0625).on,
    "picked keys, a quarter": methods.ours(keep=0.25, weights="pick").on,
    "whole tokens, five eighths": methods.ours(keep=0.625, merge="qkv").on,
    "whole tokens, half": methods.ours(keep=0.5, merge="qkv").on,
    "whole tokens, half, copies": methods.ours(keep=0.5, merge="qkv", detail=False).on,
    "preset plain, half": methods.ours(keep=0.5, preset="plain").on,
}
_RIVALS: dict[str, On] = {
    "ToDo (every fourth key)": methods.RIVALS["todo 2"].on,
    "means of 2 x 2 as keys": methods.RIVALS["pool-kv 2x2"].on,
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


@contextmanager
def unfused(on: On, model: Any) -> Iterator[None]:
    """Attention by two products and a softmax, as without xFormers before PyTorch 2.0."""
    before = dict(model.attn_processors)
    model.set_attn_processor(AttnProcessor())
    try:
        with on(model):
            yield
    finally:
        model.set_attn_processor(before)


def _free(share: float, merge: str) -> On:
    config = MaMeConfig(keep=share, merge=merge)  # type: ignore[arg-type]
    return partial(free_on, config=config)


def rows_of(case: Case) -> Mapping[str, On]:
    """What is reckoned of a case, by the row's name."""
    if case.is_unet:
        return {
            **_OURS,
            "tomesd, half": partial(tomesd_row, 0.5),
            **_RIVALS,
            "free: a quarter of the keys": _free(0.25, "kv"),
            "free: half of the tokens": _free(0.5, "qkv"),
        }
    assert isinstance(case.model, shapes.Shape)
    tokens = case.model.tokens
    return {
        **_OURS,
        "tomesd's form, half": methods.tomesd_form(0.5).on,
        **_RIVALS,
        "free: a quarter of the keys": lambda model: shapes.FreeKeys(tokens, 0.25),
    }


# Rows that only published figures are held against, by name. How many tokens tau keeps is not
# known; half is the least that the paper's partition allows.
MAME_07, MAME_08 = "its own, tau 0.7 (half)", "its own, tau 0.8 (half)"
PUBLISHED_ROWS: dict[str, On] = {
    "unmerged": nullcontext,
    "unfused": partial(unfused, nullcontext),
    **{f"tomesd {ratio}": partial(tomesd_row, ratio) for ratio in (0.25, 0.5)},
    **dict.fromkeys((MAME_07, MAME_08), methods.ours(keep=0.5, preset="plain").on),
    **{
        f"unfused, tomesd {ratio}": partial(unfused, partial(tomesd_row, ratio))
        for ratio in (0.3, 0.5)
    },
}
