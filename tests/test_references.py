"""Reference images of edits merge by `references=`: each on its own grid, to its own share, as a
float64 loop does it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import pytest
import torch

from mame_sd import MaMeAttnProcessor, MaMeConfig, apply_mame, remove_mame
from mame_sd.config import Study
from mame_sd.diffusion import layer
from tests.builders.transformers import TEXT, H, W, normal
from tests.builders.transformers import run as output_of
from tests.matrix.models.sweep import CASES
from tests.matrix.models.watch import Attention, by_loop, merging

SIZES = ((4, 6), (2, 6))
COUNT = H * W + sum(h * w for h, w in SIZES)
KEEP, SHARE = 0.5, 0.25


def packed(inputs: dict[str, Any]) -> dict[str, Any]:
    """Tokens of references behind those of the image, with ids of their own."""
    ids, width = [inputs["img_ids"]], inputs["img_ids"].shape[1]
    for number, size in enumerate(SIZES, start=1):
        places = torch.cartesian_prod(*(torch.arange(float(n)) for n in size))
        own = torch.zeros(len(places), width)
        own[:, 0], own[:, 1:3] = number, places
        ids.append(own)
    inputs = {**inputs, "hidden_states": normal(2, COUNT, 4), "img_ids": torch.cat(ids)}
    if "joint_attention_kwargs" in inputs:
        mask = torch.zeros(2, 1, TEXT + COUNT, TEXT + COUNT)
        inputs["joint_attention_kwargs"] = {"attention_mask": mask}
    return inputs


def qwen(inputs: dict[str, Any]) -> dict[str, Any]:
    shapes = [(1, H, W), *((1, *size) for size in SIZES)]
    return {**inputs, "hidden_states": normal(2, COUNT, 16), "img_shapes": [shapes] * 2}


def listed(inputs: dict[str, Any]) -> dict[str, Any]:
    shapes = [(1, H, W), *((1, *size) for size in SIZES)]
    return {**inputs, "hidden_states": normal(2, COUNT, 4, 1, 2, 2), "shape_list": [shapes] * 2}


def built_in(model: str) -> Any:
    """A mark that skips where diffusers has no such class yet."""
    return pytest.mark.skipif(
        not hasattr(diffusers, model), reason=f"this diffusers has no {model}"
    )


@dataclass(frozen=True)
class Edit:
    """A model of edits: how its inputs come to references, of which sizes."""

    model: str
    given: Callable[[dict[str, Any]], dict[str, Any]]
    sizes: tuple[tuple[int, int], ...] = SIZES


EDITS = (
    Edit("FluxTransformer2DModel", packed),
    Edit("Flux2Transformer2DModel", packed),
    Edit("LongCatImageTransformer2DModel", packed),
    Edit("BriaFiboTransformer2DModel", packed),
    Edit("QwenImageTransformer2DModel", qwen),
    Edit("JoyImageEditTransformer3DModel", dict, ((H, W),)),
    Edit("JoyImageEditPlusTransformer3DModel", listed),
)
PARAMS = [pytest.param(edit, id=edit.model, marks=built_in(edit.model)) for edit in EDITS]


def built(edit: Edit) -> tuple[Any, dict[str, Any]]:
    case = next(case for case in CASES if case.name == edit.model)
    return case.build().eval(), edit.given(case.inputs())


def kept(size: tuple[int, int], share: float) -> int:
    return round(size[0] * size[1] * share)


@pytest.mark.parametrize("edit", PARAMS)
def test_each_reference_merges_on_its_own_grid(edit: Edit, monkeypatch: Any) -> None:
    model, inputs = built(edit)
    before = output_of(inputs, model)
    planned: list[tuple[Any, ...]] = []

    def plan_merge(x: Any, config: MaMeConfig, size: Any, **more: Any) -> Any:
        planned.append((size, config.keep))
        return plan(x, config, size, **more)

    plan = layer.plan_merge
    monkeypatch.setattr(layer, "plan_merge", plan_merge)
    handle = apply_mame(
        model, keep=KEEP, references=SHARE, min_tokens=1, study=Study(correct=False)
    )
    with merging() as calls:
        output_of(inputs, model)
    assert planned == [((H, W), KEEP), *((size, SHARE) for size in edit.sizes)] * len(calls)
    sides = [(H, W), *edit.sizes]
    for call in calls:
        torch.testing.assert_close(call.output, by_loop(call), rtol=1e-4, atol=1e-5)
        each = call.plan.rows.split([h * w for h, w in sides], 1)
        for rows, (first, last) in zip(each, ends(call.plan), strict=True):
            assert (rows.min(), rows.max()) == (first, last)
    own, *others = calls[0].plan.parts
    assert own.tokens_kept == kept((H, W), KEEP)
    assert [part.tokens_kept for part in others] == [kept(size, SHARE) for size in edit.sizes]
    handle.set(references=None)
    with merging() as calls:
        output_of(inputs, model)
    assert {call.plan.tokens_in for call in calls} == {H * W}
    remove_mame(model)
    assert torch.equal(output_of(inputs, model), before)


def ends(plan: Any) -> list[tuple[int, int]]:
    """Of each image's merged tokens the first and the last."""
    counts = list(itertools.accumulate((part.tokens_kept for part in plan.parts), initial=0))
    return [(first, behind - 1) for first, behind in itertools.pairwise(counts)]


@pytest.mark.parametrize("edit", PARAMS)
def test_probe_of_where_references_are(edit: Edit) -> None:
    """A column of the last reference changes: its keys move, and no others do."""
    model, inputs = built(edit)
    apply_mame(model, keep=KEEP, references=SHARE, min_tokens=1, study=Study(correct=False))
    (h, w), start = edit.sizes[-1], H * W + sum(a * b for a, b in edit.sizes[:-1])
    changed = inputs["hidden_states"].clone()
    if changed.dim() == 6 and changed.shape[1] == 2:  # items, the generated one last
        changed[:, 0, ..., 2:4] += 1
    else:
        changed[:, start + 1 : start + h * w : w] += 1
    with Attention(apart=True), merging() as calls:
        output_of(inputs, model)
        half = len(calls)
        output_of({**inputs, "hidden_states": changed}, model)
    expected = torch.zeros(h, w, dtype=torch.bool)
    expected[:, 1] = True
    for was, now in zip(calls[:half], calls[half:], strict=True):
        moved = (was.call["key"] - now.call["key"]).abs().amax((0, 1, 3)) > 1e-6
        at = was.first + start
        assert torch.equal(moved[at : at + h * w], expected.flatten())
        assert int(moved.sum()) == h


def test_what_merged_keys_lack_is_given_back() -> None:
    """Corrected, the output is nearer; a share of 1 changes no reference, and gradients pass."""
    model, inputs = built(EDITS[0])
    whole = output_of(inputs, model)
    handle = apply_mame(model, keep=1.0, references=SHARE, min_tokens=1)
    errors = []
    for correct in (True, False):
        handle.set(study=Study(correct=correct))
        errors.append(float((output_of(inputs, model) - whole).norm()))
    assert 0 < errors[0] < errors[1]
    handle.set(references=1.0)
    torch.testing.assert_close(output_of(inputs, model), whole, rtol=1e-4, atol=1e-5)
    hidden = inputs["hidden_states"].requires_grad_()
    handle.set(references=SHARE)
    model(**{**inputs, "hidden_states": hidden}, return_dict=False)[0].sum().backward()
    assert hidden.grad.flatten(2).abs().amax((0, 2)).min() > 0


def test_compiled_it_is_one_graph() -> None:
    model, inputs = built(EDITS[4])
    apply_mame(model, keep=KEEP, references=SHARE, min_tokens=1)
    expected = output_of(inputs, model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(output_of(inputs, compiled), expected)


@pytest.mark.parametrize("weights", ["pick", "average"])
def test_other_weights(weights: str) -> None:
    model, inputs = built(EDITS[0])
    study = {"weights": weights}
    handle = apply_mame(model, keep=KEEP, references=SHARE, merge="kv", min_tokens=1, study=study)
    output_of(inputs, model)
    total = kept((H, W), KEEP) + sum(kept(size, SHARE) for size in SIZES)
    assert {layer.tokens_kept for layer in handle.report().layers} == {total}


def test_models_without_references_refuse_it() -> None:
    model: Any = next(c for c in CASES if c.name == "SD3Transformer2DModel").build()
    message = r"references: expected a model whose reference images .*, got SD 3; leave references"
    with pytest.raises(ValueError, match=message):
        apply_mame(model, keep=0.5, references=0.25)
    handle = apply_mame(model, keep=0.5)
    with pytest.raises(ValueError, match=message):
        handle.set(references=0.25)
    with pytest.raises(ValueError, match="sees no reference images; use apply_mame"):
        MaMeAttnProcessor(references=0.25)
    with pytest.raises(ValueError, match=r"references: .*needs merge='kv', got merge='qkv'"):
        MaMeConfig(references=0.25, merge="qkv")
    with pytest.raises(ValueError, match="references: expected a share above 0 and at most 1"):
        MaMeConfig(references=0.0)
