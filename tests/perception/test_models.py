"""Every class of vision transformers: merged as the paper says, counted, copied, saved,
checkpointed, taken off again.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mame_sd.perception import shared
from mame_sd.perception.apply_encoder import apply_encoder, has_encoder_hooks, remove_encoder
from mame_sd.perception.known_encoders import find_encoder, is_encoder
from tests.builders.perception import AROUND, DEPTH, EVERY, PATCHES, ROWS, SHALLOW, Row
from tests.perception.oracle import blocks_of, merged_oracle

every = pytest.mark.parametrize("row", EVERY)


def paired(settings: list[Any], each: int) -> list[Any]:
    """Every class of models with `each` of the settings, dealt out in turn: each setting meets
    classes of several kinds.
    """
    return [
        pytest.param(
            *row.values,
            settings[(number * each + k) % len(settings)],
            id=f"{row.id}-{number * each + k}",
            marks=row.marks,
        )
        for number, row in enumerate(EVERY)
        for k in range(each)
    ]


KINDS = ("ViTForImageClassification", "VideoMAEForVideoClassification", "timm ViT")
few = pytest.mark.parametrize("row", [row for row in EVERY if row.id in KINDS])
TOKENS = {"ViTMAEModel": 27}  # a quarter is masked


def doubled(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def squares(output: dict[str, Tensor]) -> Tensor:
    """A number that everything in an output changes."""
    return sum(  # type: ignore[return-value]
        value.double().square().sum() for value in output.values() if value.is_floating_point()
    )


def same(got: dict[str, Tensor], want: dict[str, Tensor], **tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], **tolerance)


SETTINGS: list[tuple[dict[str, Any], Any]] = [
    ({}, None),
    ({"tau": 0.2, "feature": "x"}, (0, 1, 3)),
    ({"keep": (0.6, 0.7), "prop_attn": False}, (0, 2)),
    ({"tau": 0.2, "feature": "k"}, (0, 1)),
    ({"keep": [0.7] * 4}, 4),
]


@pytest.mark.parametrize(("row", "setting"), paired(SETTINGS, 1))
def test_output_and_gradients_are_the_oracle_s(
    row: Row, setting: tuple[dict[str, Any], Any]
) -> None:
    fields, blocks = setting
    model, inputs = row.build().double(), doubled(row.batch())
    handle = apply_encoder(model, blocks=blocks, restore=False, **fields)
    remove_encoder(model)
    slow = merged_oracle(model, row, handle.configs, handle.prop_attn)
    handle.install()
    results = []
    for one in (model, slow):
        image = inputs["pixel_values"].clone().requires_grad_()
        output = row.call(one, {**inputs, "pixel_values": image})
        squares(output).backward()
        grads = {name: part.grad for name, part in one.named_parameters() if part.grad is not None}
        results.append((output, {**grads, "image": image.grad}))
    same(results[0][0], results[1][0], rtol=1e-9, atol=1e-9)
    same(results[0][1], results[1][1], rtol=1e-7, atol=1e-7)


@every
@torch.no_grad()
def test_reports_what_merged_and_leaves_no_trace(row: Row) -> None:
    model, inputs = row.build(), row.batch()
    before, names, state = row.call(model, inputs), dir(model), list(model.state_dict())
    assert is_encoder(model)
    handle = apply_encoder(model, keep=(0.5, 0.5), blocks=(0, -1))
    assert not handle.report().calls
    row.call(model, inputs)
    report = handle.report()
    patches = TOKENS.get(row.name, PATCHES)
    half, quarter = -(-patches // 2), -(-patches // 2) // 2 + (-(-patches // 2) % 2)
    assert [block.tokens_in for block in report.blocks] == [
        patches + row.prefix,
        *[half + row.prefix] * (DEPTH - 1),
    ]
    assert report.blocks[-1].tokens_kept == quarter + row.prefix
    assert [block.merged for block in report.blocks] == [True, False, False, True]
    assert report.calls == 1
    assert report.flops < report.flops_before
    assert "GFLOPs" in str(report)
    assert report.to_dict()["blocks"][0]["share"] == report.blocks[0].share
    assert list(model.state_dict()) == state
    handle.active = False
    same(row.call(model, inputs), before, rtol=0, atol=0)
    handle.active = True
    handle.remove()
    assert not handle.installed
    assert not has_encoder_hooks(model)
    same(row.call(model, inputs), before, rtol=0, atol=0)
    assert dir(model) == names


OPTIONS = [{}, {"restore": True}, {"prop_attn": False}]


@pytest.mark.parametrize(("row", "options"), paired(OPTIONS, 1))
@torch.no_grad()
def test_flops_are_those_of_the_operations_that_run(row: Row, options: dict) -> None:
    model, inputs = row.build().requires_grad_(False), row.batch(1)
    encoder = find_encoder(model)[0]
    handle = apply_encoder(model, keep=(0.5, 0.8), blocks=(0, 2), **options)
    counted = []
    for active in (True, False):
        handle.active = active
        counter = FlopCounterMode(display=False)
        enter, leave = counter.__enter__, partial(counter.__exit__, None, None, None)
        hooks = [
            encoder.register_forward_pre_hook(lambda *_, enter=enter: enter() and None),
            encoder.register_forward_hook(lambda *_, leave=leave: leave()),
        ]
        with sdpa_kernel(SDPBackend.MATH):  # the counter knows no kernel of the CPU
            row.call(model, inputs)
        counted.append(counter.get_total_flops() / 2)
        for hook in hooks:
            hook.remove()
    report = handle.report()
    assert report.flops == counted[0]
    assert report.flops_before == counted[1]


@few
@torch.no_grad()
def test_a_copy_merges_with_its_own_weights(row: Row) -> None:
    model, inputs = row.build(), row.batch()
    plain = row.call(model, inputs)
    handle = apply_encoder(model, keep=0.5, restore=True, prop_attn=True)
    want = row.call(model, inputs)
    twin = copy.deepcopy(model)
    for part in model.parameters():
        part.zero_()
    same(row.call(twin, inputs), want, rtol=0, atol=0)
    remove_encoder(twin)
    same(row.call(twin, inputs), plain, rtol=0, atol=0)
    assert handle.installed


@torch.no_grad()
def test_saves_as_if_nothing_merged(tmp_path: Path) -> None:
    row = ROWS[1]
    model, inputs = row.build(), row.batch()
    before = row.call(model, inputs)
    apply_encoder(model, keep=0.5)
    merged = row.call(model, inputs)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    same(row.call(loaded, inputs), before, rtol=0, atol=0)
    apply_encoder(loaded, keep=0.5)
    same(row.call(loaded, inputs), merged, rtol=0, atol=0)


@few
def test_trains_under_autocast(row: Row) -> None:
    model, inputs = row.build().train(), row.batch()
    apply_encoder(model, keep=0.5, blocks=2, prop_attn=True, restore=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = row.call(model, inputs)
    squares(output).backward()
    first = blocks_of(model, row)[0]
    assert all(part.grad is not None and part.grad.isfinite().all() for part in first.parameters())


@pytest.mark.parametrize(
    ("reentrant", "fields", "row"),
    [(False, {"tau": 0.3}, ROWS[1]), (True, {"keep": 0.5}, ROWS[6])],
    ids=["tau", "keep, reentrant"],
)
def test_checkpointing_changes_no_gradient(
    reentrant: bool, fields: dict[str, Any], row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    grads = []
    if AROUND:  # then a model does without grid and sizes, which blocks computed again don't know
        monkeypatch.setattr(shared, "checkpoints_around", lambda model: True)
    for checkpoint in (False, True):
        model, inputs = row.build().double().train(), doubled(row.batch())
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        handle = apply_encoder(model, blocks=(0, 2), **fields)
        handle.capture()
        image = inputs["pixel_values"].clone().requires_grad_()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            output = row.call(model, {**inputs, "pixel_values": image})
            squares(output).backward()
        assert handle.report().calls == 1 + (checkpoint and AROUND)
        grads.append(
            {name: part.grad for name, part in model.named_parameters() if part.grad is not None}
        )
    same(grads[1], grads[0])


@pytest.mark.compiles
@torch.no_grad()
def test_keep_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    model, inputs = SHALLOW.build(), SHALLOW.batch()
    handle = apply_encoder(model, keep=0.5, restore=True)
    want = SHALLOW.call(model, inputs)
    report = handle.report()
    handle.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        same(SHALLOW.call(compiled, inputs), want)
    assert handle.report().to_dict() == {**report.to_dict(), "calls": 2}
