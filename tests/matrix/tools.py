"""Rows of the matrix with checks of their own: compilation, other tools on the same pipeline,
unknown models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tomesd
import torch
from torch import nn

from mame_sd import apply_mame, remove_mame
from tests.builders.pipelines import once
from tests.builders.tiny import LATENT, one_level_unet, tiny_pipeline, unet_inputs
from tests.builders.transformers import H, W, normal, run
from tests.matrix.models.case import case
from tests.matrix.models.registry import MODELS
from tests.matrix.rows import Check

HALF: dict[str, Any] = {"keep": 0.5, "min_tokens": 60}
FLUX = MODELS["FluxTransformer2DModel"]
ONE_GRAPH = "one graph for each size; none over steps, none when a size returns"


def unet_call(step: int, size: int) -> dict[str, Any]:
    side = (LATENT, 24)[size]
    inputs = unet_inputs(one_level_unet(), height=side, width=side, seed=step)
    if step == 7:
        inputs["sample"] = inputs["sample"][1:].repeat(2, 1, 1, 1)
    return {**inputs, "timestep": torch.tensor(100 * step)}


def flux_call(step: int, size: int) -> dict[str, Any]:
    inputs, tokens = FLUX.inputs(), (H * W, 5 * W)[size]
    latents = normal(2, tokens, 4, seed=step)
    inputs["hidden_states"] = latents[1:].repeat(2, 1, 1) if step == 7 else latents
    inputs["img_ids"] = inputs["img_ids"][:tokens]
    return {**inputs, "timestep": torch.full((2,), step / 10)}


def compiled(build: Callable[[], Any], call: Callable[[int, int], dict[str, Any]]) -> None:
    """`keep` compiles into one full graph for each size, which serves all later steps, guided pairs
    of the same latents too, also when the size returns. `call(step, size)` gives the inputs.
    """
    torch.compiler.reset()
    model = build()
    steps = [(4, 0), (6, 1), (7, 0)]
    handle = apply_mame(model, **HALF)
    expected = [run(call(*step), model) for step in steps]
    handle.reset()
    model.compile(backend="eager", fullgraph=True)
    for size in range(2):
        run(call(1, size), model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step, eager in zip(steps, expected, strict=True):
            torch.testing.assert_close(run(call(*step), model), eager, rtol=1e-4, atol=1e-4)
    assert {(layer.calls, layer.merged) for layer in handle.report().layers} == {(5, True)}


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
        "torch.compile of a UNet, fullgraph",
        partial(compiled, partial(one_level_unet, transformer_layers_per_block=1), unet_call),
        ONE_GRAPH,
        sweep=True,
    ),
    Check(
        "torch.compile of Flux, fullgraph",
        partial(compiled, case(FLUX.name, num_layers=1).build, flux_call),
        ONE_GRAPH,
    ),
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
