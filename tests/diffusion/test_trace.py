"""One call of one merging layer asks each question once: few files, few calls, few returns to a
file that was left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import le
from typing import Any

import pytest
import torch

from mame_sd.diffusion.apply_denoiser import apply_mame
from mame_sd.diffusion.processor import MaMeAttnProcessor
from tests.builders.trace import counts, traced
from tests.matrix.models.registry import MODELS


def by_hooks(model: Any, **how: Any) -> None:
    apply_mame(model, min_tokens=16, **how)


def one_liner(model: Any) -> None:
    model.set_attn_processor(MaMeAttnProcessor(min_tokens=16))


def way(name: str, layer: str, merge: Callable[[Any], None]) -> list[tuple[str, str]]:
    """The trace of a layer's second call, the tables of whose partition are made. It is not the
    model's first layer, which works out the step.
    """
    model, inputs = MODELS[name].build(), MODELS[name].inputs()
    merge(model)
    module = model.get_submodule(layer)
    found: list[list[tuple[str, str]]] = []
    forward = module.forward

    def tracing(*args: Any, **kwargs: Any) -> Any:
        output: list[Any] = []
        found.append(traced(lambda: output.append(forward(*args, **kwargs))))
        return output[0]

    with torch.no_grad():
        model(**inputs)
        module.forward = tracing
        model(**{name: value.clone() for name, value in inputs.items()})
    return found[0]


UNET = ("UNet2DConditionModel", "up_blocks.1.attentions.0.transformer_blocks.0.attn1")
SD3 = ("SD3Transformer2DModel", "transformer_blocks.1.attn")
# Of each way at most so many files of ours entered, calls of functions of ours, and returns to a
# file that was left before.
WAYS: dict[str, tuple[tuple[str, str], Any, tuple[int, int, int]]] = {
    "unet": (UNET, by_hooks, (6, 30, 8)),
    "one-liner": (UNET, one_liner, (10, 35, 11)),
    "unet-tau": (UNET, partial(by_hooks, tau=0.3), (6, 31, 13)),
    "sd3": (SD3, by_hooks, (7, 30, 9)),
}


@pytest.mark.parametrize(("layer", "merge", "most"), WAYS.values(), ids=WAYS)
def test_a_call_of_a_layer_asks_each_question_once(
    layer: tuple[str, str], merge: Any, most: tuple[int, int, int]
) -> None:
    trace = way(*layer, merge)
    found = counts(trace)
    assert found[1] > 10  # it merged
    assert all(map(le, found, most)), f"{found}: {Counter(trace).most_common()}"
