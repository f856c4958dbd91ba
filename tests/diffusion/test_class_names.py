"""Test models and attention whose classes are derived, renamed (FSDP2) or wrapped."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.transformers.transformer_flux import FluxAttention
from torch import Tensor, nn

from mame_sd import NothingMergedError, apply_mame
from tests.builders.tiny import run_unet, tiny_unet, unet_inputs
from tests.builders.transformers import run
from tests.matrix.models.registry import MODELS

MERGING = {"keep": 0.5, "min_tokens": 1}


def renamed(model: nn.Module) -> None:
    """Derive the class of each module, as FSDP2's `fully_shard` does."""
    for module in model.modules():
        kind = type(module)
        module.__class__ = type(f"FSDP{kind.__name__}", (kind,), {})


@pytest.mark.parametrize("name", ["DiTTransformer2DModel", "UNet2DConditionModel"])
@pytest.mark.parametrize("late", [False, True])
def test_a_model_whose_classes_are_renamed_merges_as_before(name: str, late: bool) -> None:
    case = MODELS[name]
    model = case.build()
    with apply_mame(model, **MERGING) as handle:
        expected, described = run(case.inputs(), model), handle.described
    if not late:
        renamed(model)
    handle = apply_mame(model, **MERGING)
    if late:
        renamed(model)
    assert torch.equal(run(case.inputs(), model), expected)
    assert handle.described == described


class Plugin(FluxAttention):
    """Define an attention class as a plug-in would derive it."""


class UnknownAttention(nn.Module):
    """Wrap an attention module, so that it is unknown what it attends to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = [inner]  # no child

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See `inner`."""
        return self.inner[0](*args, **kwargs)


def test_derived_attention_merges_and_the_report_names_unknown_attention() -> None:
    case = MODELS["FluxTransformer2DModel"]
    model = case.build()
    layers = len(apply_mame(model, **MERGING).layers)
    model.transformer_blocks[0].attn.__class__ = Plugin
    handle = apply_mame(model, **MERGING)
    assert len(handle.layers) == layers
    run(case.inputs(), model)
    assert "no family" not in str(handle.report())
    block = model.transformer_blocks[0]
    block.attn = UnknownAttention(block.attn)
    handle = apply_mame(model, **MERGING)
    run(case.inputs(), model)
    assert handle.report().to_dict()["unknown"] == {"UnknownAttention": 1}
    assert "not merged: 1 UnknownAttention, which no family describes" in str(handle.report())


def by_position(unet: Any, timestep: int) -> Tensor:
    inputs = unet_inputs(unet)
    sample = torch.cat([inputs["sample"][:1]] * 2)
    text = inputs["encoder_hidden_states"]
    text = torch.cat([text[:1], text[:1] + 1])
    with torch.no_grad():
        output: Tensor = unet(sample, torch.tensor(timestep), text)[0]
    return output


class Derived(UNet2DConditionModel):
    """Pass all arguments on, without naming them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See `UNet2DConditionModel`."""
        return super().forward(*args, **kwargs)


def test_a_forward_that_passes_on_what_it_is_given_is_read_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unet = tiny_unet()
    with apply_mame(unet, **MERGING):
        expected = [by_position(unet, timestep) for timestep in (900, 100)]
    assert not torch.equal(*expected)
    unet.__class__ = Derived
    with apply_mame(unet, **MERGING):
        assert all(map(torch.equal, [by_position(unet, t) for t in (900, 100)], expected))
    unet.__class__ = UNet2DConditionModel
    own = UNet2DConditionModel.forward

    @functools.wraps(own)
    def told(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    monkeypatch.setattr(UNet2DConditionModel, "forward", told)
    with apply_mame(unet, **MERGING):
        assert all(map(torch.equal, [by_position(unet, t) for t in (900, 100)], expected))
    monkeypatch.setattr(UNet2DConditionModel, "forward", lambda *args, **more: own(*args, **more))
    with (
        pytest.warns(UserWarning, match=r"UNet2DConditionModel.forward was replaced .* functools"),
        apply_mame(unet, **MERGING),
    ):
        run_unet(unet)


def test_arguments_whose_names_are_hidden_leave_layers_unmerged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = MODELS["FluxTransformer2DModel"]
    model, inputs = case.build(), dict(case.inputs())
    args = [inputs.pop(name) for name in ("hidden_states", "encoder_hidden_states")]
    args += [inputs.pop(name) for name in ("pooled_projections", "timestep", "img_ids", "txt_ids")]
    with torch.no_grad():
        expected = model(*args, **inputs)[0]
        own = type(model).forward
        monkeypatch.setattr(type(model), "forward", lambda *args, **more: own(*args, **more))
        with pytest.warns(UserWarning, match="forward was replaced"):
            handle = apply_mame(model, **MERGING)
        assert torch.equal(model(*args, **inputs)[0], expected)
    with pytest.raises(NothingMergedError, match="doesn't name its arguments by position"):
        handle.report()
