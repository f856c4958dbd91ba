"""Reference images of edits merge by `references=`.

Each merges on its own grid, to its own share, as a float64 loop does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F

from mame_sd import (
    MaMeAttnProcessor,
    MaMeConfig,
    NothingMergedError,
    apply_mame,
    remove_mame,
)
from tests.builders.transformers import TEXT, H, W, normal
from tests.builders.transformers import run as output_of
from tests.matrix.models.registry import MODELS
from tests.matrix.models.restored import restoring
from tests.matrix.models.watch import NoAttention, check_by_loop, merging

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


def shaped(name: str, *dims: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Tokens of these dimensions, and an argument that lists the sizes of all images."""
    shapes = [(1, H, W), *((1, *size) for size in SIZES)]
    tokens = normal(2, COUNT, *dims)
    return lambda inputs: {**inputs, "hidden_states": tokens, name: [shapes] * 2}


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
    Edit("QwenImageTransformer2DModel", shaped("img_shapes", 16)),
    Edit("JoyImageEditTransformer3DModel", dict, ((H, W),)),
    Edit("JoyImageEditPlusTransformer3DModel", shaped("shape_list", 4, 1, 2, 2)),
)


def built(edit: Edit) -> tuple[Any, dict[str, Any]]:
    if not hasattr(diffusers, edit.model):
        pytest.skip(f"this diffusers has no {edit.model}")
    case = MODELS[edit.model]
    return case.build().eval(), edit.given(case.inputs())


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.model)
def test_each_reference_merges_on_its_own_grid(edit: Edit) -> None:
    model, inputs = built(edit)
    before = output_of(inputs, model)
    handle = apply_mame(model, keep=KEEP, references=SHARE, min_tokens=1)
    with merging() as calls:
        output_of(inputs, model)
    sides = [((H, W), KEEP), *((size, SHARE) for size in edit.sizes)]
    assert calls
    for call in calls:
        assert [(grid.size, grid.keep) for grid in call.job.grids] == sides
        assert [part.tokens_in for part in call.groups] == [h * w for (h, w), _ in sides]
        assert [part.tokens_kept for part in call.groups] == [
            round(h * w * share) for (h, w), share in sides
        ]
        check_by_loop(call)
    check_probe(edit, model, inputs)
    handle.set(references=None)
    with merging() as calls:
        output_of(inputs, model)
    assert {len(call.groups) for call in calls} == {1}
    remove_mame(model)
    assert torch.equal(output_of(inputs, model), before)


def check_probe(edit: Edit, model: Any, inputs: dict[str, Any]) -> None:
    """Change a column of the last reference: its keys move, and no others do."""
    (h, w), start = edit.sizes[-1], H * W + sum(a * b for a, b in edit.sizes[:-1])
    changed = inputs["hidden_states"].clone()
    if changed.dim() == 6 and changed.shape[1] == 2:  # items, the generated one last
        changed[:, 0, ..., 2:4] += 1
    else:
        changed[:, start + 1 : start + h * w : w] += 1
    with NoAttention(), merging() as calls:
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


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.model)
def test_mlps_are_restored_on_the_grid_of_each_reference(edit: Edit) -> None:
    model, inputs = built(edit)
    before = output_of(inputs, model)
    handle = apply_mame(model, keep=1, mlp_keep=0.25, min_tokens=1)
    whole = H * W + sum(h * w for h, w in edit.sizes)
    for references, count in ((None, whole), (0.5, whole), (1, H * W)):
        handle.set(references=references, keep=1)
        with restoring(handle) as calls:
            output_of(inputs, model)
        assert calls
        for call in calls:
            call.check()
            assert call.chosen.tokens_in == count
        layers = [one for one in handle.report().layers if one.kind == "mlp" and one.merged]
        assert {one.tokens_in for one in layers} == {count}
        others = f"reference image{'s' * (len(edit.sizes) > 1)} too"
        assert {others in one.reason for one in layers} == {references != 1}
        handle.reset()
    handle.set(references=None, min_tokens=H * W)  # references are smaller
    with restoring(handle) as calls:
        output_of(inputs, model)
    small = min(h * w for h, w in edit.sizes) < H * W
    assert {call.chosen.tokens_in for call in calls} == {H * W if small else whole}
    remove_mame(model)
    assert torch.equal(output_of(inputs, model), before)


def test_by_default_references_merge_like_the_image() -> None:
    model, inputs = built(EDITS[0])
    handle = apply_mame(model, min_tokens=1)
    with merging() as calls:
        output_of(inputs, model)
    assert calls
    for call in calls:
        assert [(grid.size, grid.keep) for grid in call.job.grids] == [
            (size, 0.25) for size in ((H, W), *SIZES)
        ]
        check_by_loop(call)
    for keep, others in ({"keep": 0.25}, 0), ({"keep": None, "references": 0.5}, len(SIZES)):
        handle.set(**keep)
        with merging() as calls:
            output_of(inputs, model)
        assert {len(call.groups) for call in calls} == {1 + others}


def test_by_default_tokens_of_references_count() -> None:
    """576 tokens of an image are too few to merge on a CPU, with as many of a reference enough."""
    model, inputs = built(EDITS[0])
    places = torch.cartesian_prod(*[torch.arange(24.0)] * 2)
    ids = torch.cat([F.pad(places, (1, 0), value=number) for number in (0.0, 1.0)])
    handle = apply_mame(model)
    for images in (1, 2):
        given = {"hidden_states": normal(2, images * 576, 4), "img_ids": ids[: images * 576]}
        output_of({**inputs, **given}, model)
        attentions = [one for one in handle.report().layers if one.kind == "attention"]
        assert {bool(one.merged) for one in attentions} == {images == 2}
        handle.reset()


def test_by_default_references_stay_where_no_model_of_edits_reads_them() -> None:
    case = MODELS["OvisImageTransformer2DModel"]
    model: Any = case.build().eval()
    apply_mame(model, min_tokens=1)
    with merging() as calls:
        output_of(packed(case.inputs()), model)
    assert {len(call.groups) for call in calls} == {1}


def test_models_without_references_refuse_it() -> None:
    model: Any = MODELS["SD3Transformer2DModel"].build()
    message = r"references: expected a model whose reference images .*, got SD 3; leave references"
    with pytest.raises(ValueError, match=message):
        apply_mame(model, keep=0.5, references=0.25)
    handle = apply_mame(model, keep=0.5)
    with pytest.raises(ValueError, match=message):
        handle.set(references=0.25)
    with pytest.raises(ValueError, match="sees no reference images; use apply_mame"):
        MaMeAttnProcessor(references=0.25)
    with pytest.raises(ValueError, match="references: goes with keep"):
        MaMeConfig(references=0.25, tau=0.5)
    with pytest.raises(ValueError, match="references: expected a share above 0 and at most 1"):
        MaMeConfig(references=0.0)


def test_tokens_of_references_that_merge_count() -> None:
    """Count tokens of references that merge when a layer's size is compared with min_tokens."""
    edit = EDITS[0]
    model, inputs = built(edit)
    least = H * W + 1
    handle = apply_mame(model, keep=KEEP, min_tokens=least)
    output_of(inputs, model)
    with pytest.raises(NothingMergedError, match=f"fewer than min_tokens={least}"):
        handle.report()
    handle.set(references=SHARE)
    output_of(inputs, model)
    assert all(layer.merged for layer in handle.report().layers)
