"""Tokens restored to their places: hidden states of every block, dense heads, means, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mame_sd.perception.apply_encoder import apply_encoder, has_encoder_hooks, remove_encoder
from tests.builders.perception import DENSE, NAMED, PATCHES, TIMM, VIT, Row

dense = pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in DENSE])


@torch.no_grad()
def test_a_hidden_state_is_restored_by_the_blocks_before_it() -> None:
    model, inputs = VIT.build(), VIT.batch()
    handle = apply_encoder(model, keep=0.6, blocks=(0, 2))
    handle.capture()
    states = model(**inputs, output_hidden_states=True).hidden_states
    plans = handle.plans()
    assert torch.equal(handle.restore(states[1]), plans[0].restore(states[1]))
    assert torch.equal(handle.restore(states[2]), plans[0].restore(states[2]))
    assert torch.equal(handle.restore(states[4]), plans[0].restore(plans[2].restore(states[4])))
    assert torch.equal(handle.restore(states[2], block=1), handle.restore(states[2]))
    assert torch.equal(handle.restore(states[4], block=-1), handle.restore(states[4]))
    for features, block in (
        (states[0], None),
        (states[0], 1),
        (states[1], 3),
        (states[4][:1], None),
        (states[4].repeat(2, 1, 1), 3),
    ):
        with pytest.raises(ValueError, match=r"restore: expected a tensor of shape \[2, L', C\]"):
            handle.restore(features, block)
    assert torch.equal(handle.owners(-1), handle.owners())
    with pytest.raises(ValueError, match="block: expected one from 0 to 3, or -1, got 4"):
        handle.owners(4)
    handle = apply_encoder(model, keep=0.6, blocks=(2,))
    handle.capture()
    first = model(**inputs, output_hidden_states=True).hidden_states[1]
    assert handle.restore(first, block=0) is first, "nothing has merged before it"


@pytest.mark.parametrize("row", [pytest.param(VIT, id=VIT.name), TIMM[0]])
@torch.no_grad()
def test_features_of_an_earlier_forward_are_refused(row: Row) -> None:
    model: Any = row.build()
    handle = apply_encoder(model, keep=0.6)
    handle.capture()
    features = (
        (lambda **inputs: model.vit(**inputs).last_hidden_state)
        if row is VIT
        else lambda **inputs: model.forward_features(*inputs.values())
    )
    first, second = (features(**row.batch(seed=seed)) for seed in (0, 1))
    handle.restore(second)
    for earlier in (first, first[:, :, :8]):
        with pytest.raises(
            ValueError, match="expected features of the latest forward, got those of an earlier one"
        ):
            handle.restore(earlier)


@dense
@torch.no_grad()
def test_dense_heads_find_every_token_at_its_place(row: Row) -> None:
    model, inputs = (
        row.build().double(),
        {name: value.double() for name, value in row.batch().items()},
    )
    before = row.call(model, inputs)
    exact = apply_encoder(model, tau=1.0)
    for name, value in row.call(model, inputs).items():
        torch.testing.assert_close(value, before[name], msg=f"{name}: nothing merges at tau 1")
    assert exact.report().share == pytest.approx(1, abs=0.1)
    handle = apply_encoder(model, blocks=(0, 2))
    merged = row.call(model, inputs)
    assert {name: value.shape for name, value in merged.items()} == {
        name: v.shape for name, v in before.items()
    }
    assert handle.report().layers[-1].tokens_kept < PATCHES
    assert not all(torch.allclose(value, before[name]) for name, value in merged.items())
    assert not handle._shared.now.plans, "no plan outlives the forward"
    with pytest.raises(ValueError, match="restore: expected True for"):
        apply_encoder(model, restore=False)
    remove_encoder(model)
    assert not has_encoder_hooks(model)
    for name, value in row.call(model, inputs).items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    ("row", "restored"),
    [
        pytest.param(NAMED["Dinov2ForImageClassification"], True, id="DINOv2"),
        pytest.param(NAMED["SiglipForImageClassification"], True, id="SigLIP"),
        pytest.param(VIT, False, id="ViT"),
        pytest.param(*TIMM[2].values, True, id=TIMM[2].id, marks=TIMM[2].marks),
        pytest.param(*TIMM[0].values, False, id=TIMM[0].id, marks=TIMM[0].marks),
    ],
)
@torch.no_grad()
def test_heads_that_take_a_mean_count_what_tokens_stand_for(row: Row, restored: bool) -> None:
    model, inputs = row.build(), row.batch()

    def logits(**fields: Any) -> Tensor:
        apply_encoder(model, keep=0.6, **fields)
        return next(iter(row.call(model, inputs).values()))

    assert torch.equal(logits(), logits(restore=restored))
    assert torch.equal(logits(), logits(restore=not restored)) == (not restored)
