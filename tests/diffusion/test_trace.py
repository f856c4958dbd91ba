"""One call of one merging layer asks each question once: few files, few calls, few returns to a
file that was left.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from mame_sd.diffusion.apply_denoiser import apply_mame
from mame_sd.diffusion.processor import MaMeAttnProcessor
from tests.builders.tiny import tiny_unet, unet_inputs
from tests.builders.trace import Trace, traced
from tests.matrix.models.registry import MODELS


def unet() -> tuple[nn.Module, dict[str, Any], Callable[[nn.Module], nn.Module]]:
    model, last = tiny_unet(), "up_blocks.1.attentions.0.transformer_blocks.0.attn1"
    return model, unet_inputs(model), lambda m: m.get_submodule(last)


def sd3() -> tuple[nn.Module, dict[str, Any], Callable[[nn.Module], nn.Module]]:
    case = MODELS["SD3Transformer2DModel"]
    return case.build(), case.inputs(), lambda m: m.transformer_blocks[1].attn


def by_hooks(model: Any, **how: Any) -> None:
    apply_mame(model, min_tokens=16, **how)


def one_liner(model: Any) -> None:
    model.set_attn_processor(MaMeAttnProcessor(min_tokens=16))


def way(build: Callable[[], Any], merge: Callable[[Any], None]) -> Trace:
    """The trace of a layer's second call, the tables of whose partition are made. It is not the
    model's first layer, which works out the step.
    """
    model, inputs, layer_of = build()
    merge(model)
    layer = layer_of(model)
    found: list[Trace] = []
    forward = layer.forward
    with torch.no_grad():
        model(**inputs)

        def tracing(*args: Any, **kwargs: Any) -> Any:
            output: list[Any] = []
            found.append(traced(lambda: output.append(forward(*args, **kwargs))))
            return output[0]

        layer.forward = tracing
        model(**{name: value.clone() for name, value in inputs.items()})
    return found[0]


# Of each way at most so many files of ours entered, calls of functions of ours, and returns to a
# file that was left before.
WAYS: dict[str, tuple[Any, Any, tuple[int, int, int]]] = {
    "unet": (unet, by_hooks, (6, 30, 8)),
    "one-liner": (unet, one_liner, (10, 35, 11)),
    "unet-tau": (unet, partial(by_hooks, tau=0.3), (6, 31, 13)),
    "sd3": (sd3, by_hooks, (7, 30, 9)),
}


@pytest.mark.parametrize(("build", "merge", "most"), WAYS.values(), ids=WAYS)
def test_a_call_of_a_layer_asks_each_question_once(
    build: Any, merge: Any, most: tuple[int, int, int]
) -> None:
    trace = way(build, merge)
    assert trace.counts[1] > 10  # it merged
    assert all(count <= limit for count, limit in zip(trace.counts, most, strict=True)), str(trace)
