"""Test what merging asks of a GPU and of the interpreter.

Tensors pretend to be on a GPU (`benchmarks/launches.py`) and have no values, so that each reading
of one raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import le
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import flux, sd3, unet, wan
from benchmarks.launches import META, counted, on_card, pretended
from mame_sd import MaMeAttnProcessor, apply_mame, attention
from tests.builders.tiny import one_level_unet, tiny_unet, unet_inputs
from tests.builders.trace import Operations, counts, traced
from tests.matrix.models.registry import tiny_model


def biased(q: Tensor, *others: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    return q


def without_bias(q: Tensor, *others: Tensor) -> Tensor:
    return q


MASK = torch.empty(2, 1, 1, 64 * 64 + 77, dtype=torch.bool, device=META)
# For each way: the grid, the number of text tokens after it, further arguments, and the largest
# number of launches in 16 bits without the layer's own kernel.
WAYS: dict[str, tuple[tuple[int, int], int, dict[str, Any], int]] = {
    "UNet": ((64, 64), 0, {"kernel": biased}, 91),
    "beside text": ((64, 64), 77, {"kernel": biased}, 93),
    "means": ((64, 64), 0, {"kernel": biased, "fit_queries": 0}, 27),
    "odd sides": ((61, 67), 0, {"kernel": biased}, 95),
    "masked": ((64, 64), 77, {"kernel": biased, "attn_mask": MASK}, 130),
    "kernel without bias": ((64, 64), 0, {"kernel": without_bias}, 123),
}


@pytest.mark.parametrize(("grid", "after", "how", "budget"), WAYS.values(), ids=WAYS)
def test_a_merging_layer_launches_few_kernels(
    grid: tuple[int, int], after: int, how: dict[str, Any], budget: int
) -> None:
    x = torch.empty(2, 8, grid[0] * grid[1] + after, 40, dtype=torch.bfloat16, device=META)
    draw, leader = (torch.zeros(n, dtype=torch.long, device=META) for n in (1, 2))

    def run() -> Tensor:
        return attention(x, x, x, grid, after=after, draw=draw, leader=leader, **how)

    with pretended():
        run()  # the tables are made
        work = counted(run)
    assert sum(one.launches for one in work) <= budget, [one.name for one in work]


def test_a_model_whose_layers_do_not_merge_launches_nothing_more() -> None:
    model, inputs = tiny_unet(), unet_inputs(tiny_unet())
    with torch.no_grad():
        with Operations() as alone:
            model(**inputs)
        told = pytest.warns(UserWarning, match="no layer merges.* 256 tokens: lower min_tok")
        with apply_mame(model, min_tokens=10**6), told, Operations() as left:
            model(**inputs)
    assert left.names == alone.names


SMALL = {"heads": 2, "text": 7}
CASES = {
    "UNet": unet(one_level_unet().config, 128, torch.float32),
    "SD3": sd3((8, 12), layers=2, **SMALL),
    "FLUX": flux((8, 12), layers=(1, 1), batch=2, **SMALL),
    "Wan": wan((3, 4, 6), layers=1, batch=2, **SMALL),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_waits_for_the_device(name: str) -> None:
    case = CASES[name]
    model = on_card(case.build(META))
    named, known = case.inputs(model)
    with apply_mame(model, keep=0.25, min_tokens=16) as handle:
        for values in known, {}:  # a call that reads values comes before a captured call
            with pretended(values):
                output = model(**named, return_dict=False)[0]
        merged = [layer for layer in handle.report().layers if layer.share < 1]
    assert output.is_meta
    assert len(merged) >= 1
    assert all(layer.calls == 2 for layer in merged)


def by_hooks(model: Any, **how: Any) -> None:
    apply_mame(model, min_tokens=16, **how)


def one_liner(model: Any) -> None:
    model.set_attn_processor(MaMeAttnProcessor(min_tokens=16))


def way(name: str, layer: str, merge: Callable[[Any], None]) -> list[tuple[str, str]]:
    """Return the trace of a second call of a layer that is not the model's first."""
    model, inputs = tiny_model(name)
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
JOINT = ("SD3Transformer2DModel", "transformer_blocks.1.attn")
# For each way the largest numbers of our files that are entered, of calls of our functions, and of
# returns to a file that was left before.
TRACED: dict[str, tuple[tuple[str, str], Any, tuple[int, int, int]]] = {
    "unet": (UNET, by_hooks, (6, 30, 8)),
    "one-liner": (UNET, one_liner, (9, 35, 11)),
    "unet-tau": (UNET, partial(by_hooks, tau=0.3), (4, 29, 11)),
    "sd3": (JOINT, by_hooks, (6, 32, 11)),
}


@pytest.mark.parametrize(("layer", "merge", "most"), TRACED.values(), ids=TRACED)
def test_a_call_of_a_layer_asks_each_question_once(
    layer: tuple[str, str], merge: Any, most: tuple[int, int, int]
) -> None:
    trace = way(*layer, merge)
    found = counts(trace)
    assert found[1] > 10  # it merged
    assert all(map(le, found, most)), f"{found}: {Counter(trace).most_common()}"
