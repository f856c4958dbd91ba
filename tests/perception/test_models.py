"""Every class of vision transformers: merged, counted, copied, saved, checkpointed, removed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mame_sd.core import groups
from mame_sd.perception.apply_encoder import apply_encoder, has_encoder_hooks, remove_encoder
from mame_sd.perception.encoder_registry import find_encoder, is_encoder
from tests.builders.perception import AROUND, DEPTH, EVERY, NAMED, PATCHES, SHALLOW, VIT, Row
from tests.perception.oracle import blocks_of, merged_oracle


def paired(settings: list[Any]) -> list[Any]:
    """Every class of models with one of the settings, dealt out in turn."""
    return [
        pytest.param(*row.values, settings[number % len(settings)], id=row.id, marks=row.marks)
        for number, row in enumerate(EVERY)
    ]


TOKENS = {"ViTMAEModel": 27}  # a quarter is masked


def doubled(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def squares(output: dict[str, Tensor]) -> Tensor:
    """Return a number that changes with everything in an output."""
    return sum(  # type: ignore[return-value]
        value.double().square().sum() for value in output.values() if value.is_floating_point()
    )


def same(got: dict[str, Tensor], want: dict[str, Tensor], **tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], **tolerance)


SETTINGS: list[tuple[dict[str, Any], Any]] = [
    ({}, None),
    ({"tau": 0.2}, (0, 1, 3)),
    ({"keep": (0.6, 0.7), "prop_attn": False}, (0, 2)),
    ({"keep": [0.7] * 4}, 4),
]


@pytest.mark.parametrize(("row", "setting"), paired(SETTINGS))
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


def counted(row: Row, model: Any, inputs: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    """Return a model's output, and the multiply-adds of its vision transformer."""
    encoder, counter = find_encoder(model)[0], FlopCounterMode(display=False)
    hooks = [
        encoder.register_forward_pre_hook(lambda *_: counter.__enter__() and None),
        encoder.register_forward_hook(lambda *_: counter.__exit__(None, None, None)),
    ]
    with sdpa_kernel(SDPBackend.MATH):  # the counter knows no kernel of the CPU
        output = row.call(model, inputs)
    for hook in hooks:
        hook.remove()
    return output, counter.get_total_flops() / 2


OPTIONS = [{}, {"restore": True}, {"prop_attn": False}]


@pytest.mark.parametrize(("row", "options"), paired(OPTIONS))
@torch.no_grad()
def test_reports_the_operations_that_run_and_leaves_no_trace(
    row: Row, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "ADDING", ())  # reports count what a card does
    model, inputs = row.build().requires_grad_(False), row.batch(1)
    before, whole = counted(row, model, inputs)
    names, state = dir(model), list(model.state_dict())
    assert is_encoder(model)
    handle = apply_encoder(model, keep=(0.5, 0.5), blocks=(0, -1), **options)
    assert not handle.report().calls
    _, left = counted(row, model, inputs)
    report = handle.report()
    assert (report.calls, report.flops, report.flops_before) == (1, left, whole)
    patches = TOKENS.get(row.name, PATCHES)
    half = -(-patches // 2)
    tokens = [patches, *[half] * (DEPTH - 1), half // 2 + half % 2]
    seen = [block.tokens_in for block in report.layers] + [report.layers[-1].tokens_kept]
    assert seen == [row.prefix + count for count in tokens]
    assert [block.merged for block in report.layers] == [True, False, False, True]
    assert "GFLOPs" in str(report)
    assert report.to_dict()["layers"][0]["share"] == report.layers[0].share
    assert list(model.state_dict()) == state
    handle.active = False
    same(counted(row, model, inputs)[0], before, rtol=0, atol=0)
    handle.active = True
    handle.remove()
    assert not handle.installed
    assert not has_encoder_hooks(model)
    same(counted(row, model, inputs)[0], before, rtol=0, atol=0)
    assert dir(model) == names


@torch.no_grad()
def test_copies_merge_with_their_own_weights_and_saved_ones_do_not(tmp_path: Path) -> None:
    model, inputs = cast(Any, VIT.build()), VIT.batch()
    plain = VIT.call(model, inputs)
    handle = apply_encoder(model, keep=0.5)
    want = VIT.call(model, inputs)
    model.save_pretrained(tmp_path)
    twin, loaded = copy.deepcopy(model), type(model).from_pretrained(tmp_path).eval()
    for part in model.parameters():
        part.zero_()
    same(VIT.call(loaded, inputs), plain, rtol=0, atol=0)
    same(VIT.call(twin, inputs), want, rtol=0, atol=0)
    remove_encoder(twin)
    same(VIT.call(twin, inputs), plain, rtol=0, atol=0)
    assert handle.installed


def test_trains_under_autocast() -> None:
    model, inputs = VIT.build().train(), VIT.batch()
    apply_encoder(model, keep=0.5, blocks=2, prop_attn=True, restore=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = VIT.call(model, inputs)
    squares(output).backward()
    first = blocks_of(model, VIT)[0]
    assert all(part.grad is not None and part.grad.isfinite().all() for part in first.parameters())


@pytest.mark.skipif(AROUND, reason="refused around whole blocks")
@pytest.mark.parametrize(
    ("reentrant", "fields", "row"),
    [(False, {"tau": 0.3}, VIT), (True, {"keep": 0.5}, NAMED["Dinov2ForImageClassification"])],
    ids=["tau", "keep, reentrant"],
)
def test_checkpointing_changes_no_gradient(
    reentrant: bool, fields: dict[str, Any], row: Row
) -> None:
    grads = []
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
        assert handle.report().calls == 1
        grads.append(
            {name: part.grad for name, part in model.named_parameters() if part.grad is not None}
        )
    same(grads[1], grads[0])


@pytest.mark.compiles
@torch.no_grad()
def test_keep_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    model, inputs = SHALLOW.build(), SHALLOW.batch()
    handle = apply_encoder(model, keep=0.5, blocks=1, restore=True)
    want = SHALLOW.call(model, inputs)
    report = handle.report()
    handle.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        same(SHALLOW.call(compiled, inputs), want)
    assert handle.report().to_dict() == {**report.to_dict(), "calls": 2}
