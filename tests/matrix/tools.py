"""Rows of the matrix with checks of their own: compilation, other tools on the same pipeline,
unknown models.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import tomesd
import torch
from torch import nn

from mame_sd import apply_mame, remove_mame
from tests.builders.pipelines import once
from tests.builders.tiny import LATENT, one_level_unet, tiny_pipeline, unet_inputs
from tests.builders.transformers import run
from tests.matrix.models.case import case
from tests.matrix.models.registry import MODELS
from tests.matrix.rows import Check

HALF: dict[str, Any] = {"keep": 0.5, "min_tokens": 60}


def compiled() -> None:
    """`keep` compiles into one full graph for each size, which serves all later steps, guided pairs
    of the same latents too, also when the size returns.
    """
    torch.compiler.reset()
    unet, larger = one_level_unet(transformer_layers_per_block=1), 24
    steps = [(4, LATENT), (6, larger), (7, LATENT)]

    def forward(step: int, side: int) -> torch.Tensor:
        inputs = unet_inputs(unet, height=side, width=side, seed=step)
        if step == 7:
            inputs["sample"] = inputs["sample"][1:].repeat(2, 1, 1, 1)
        with torch.no_grad():
            sample: torch.Tensor = unet(**{**inputs, "timestep": torch.tensor(100 * step)}).sample
        return sample

    handle = apply_mame(unet, **HALF)
    expected = [forward(*step) for step in steps]
    handle.reset()
    unet.compile(backend="eager", fullgraph=True)
    for side in (LATENT, larger):
        forward(1, side)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step, eager in zip(steps, expected, strict=True):
            torch.testing.assert_close(forward(*step), eager, rtol=1e-4, atol=1e-4)
    assert [layer.merged for layer in handle.report().layers] == [True]


def compiled_flux() -> None:
    """Flux compiles with its hooks as a whole in one graph."""
    torch.compiler.reset()
    flux = MODELS["FluxTransformer2DModel"]
    model = case(flux.name, num_layers=1).build()
    handle = apply_mame(model, **HALF)
    expected = run(flux.inputs(), model)
    handle.reset()
    model.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(run(flux.inputs(), model), expected)
    assert {(layer.calls, layer.merged) for layer in handle.report().layers} == {(1, True)}


def tomesd_first() -> None:
    """tomesd's patch found by `apply_mame`'s hooks, or put on after them: the same error."""
    for order in ("tomesd first", "tomesd second"):
        pipe = tiny_pipeline()
        before = once(pipe)
        steps = [partial(tomesd.apply_patch, pipe, ratio=0.5), partial(apply_mame, pipe, **HALF)]
        for step in steps if order == "tomesd first" else reversed(steps):
            step()
        with pytest.raises(ValueError, match=r"tomesd\.remove_patch"):
            once(pipe)
        tomesd.remove_patch(pipe)
        assert not torch.equal(once(pipe), before)
        remove_mame(pipe)
        assert torch.equal(once(pipe), before)


def unknown_model() -> None:
    class Mystery(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)

    with pytest.raises(
        ValueError, match=r"Mystery is not supported yet.*has 1 MultiheadAttention.*register_family"
    ):
        apply_mame(Mystery())


CHECKS = [
    Check(
        "torch.compile, whole UNet, fullgraph",
        compiled,
        "one graph for each size; none over steps, none when a size returns",
    ),
    Check("torch.compile of Flux, fullgraph", compiled_flux, "one graph"),
    Check(
        "tomesd on the same pipe",
        tomesd_first,
        "one error that says which to remove, in either order",
    ),
    Check(
        "unknown model",
        unknown_model,
        "an error that says that it is not supported yet, what attention it has, and what to do",
    ),
]
