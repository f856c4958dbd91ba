"""Tokens restored to their places: hidden states of every block, dense heads, means, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mame_sd.perception.apply_encoder import apply_encoder, has_encoder_hooks, remove_encoder
from tests.builders.perception import DENSE, NAMED, PATCHES, TIMM, VIT, Row

dense = pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in DENSE])


@pytest.mark.parametrize("fields", [{"keep": 0.6}, {"tau": 0.3}], ids=str)
@torch.no_grad()
def test_captured_plans_restore_what_the_model_restores(fields: dict[str, float]) -> None:
    model, inputs = VIT.build(), VIT.batch()
    handle = apply_encoder(model, blocks=(0, 1, 3), restore=False, **fields)
    handle.capture()
    kept = model(**inputs, output_hidden_states=True).hidden_states[-1]
    plans = handle.plans()
    assert [*plans] == [0, 1, 3]
    whole = kept
    for plan in reversed(plans.values()):
        whole = plan.restore(whole)
    places = torch.arange(PATCHES + 1).expand(2, -1)
    for plan in plans.values():
        places = places.gather(1, plan.kept.expand(2, -1))
    assert places.shape == kept.shape[:2]
    own = places.unsqueeze(-1).expand(-1, -1, kept.shape[2])
    assert torch.equal(whole.gather(1, own), kept), "each token that stays is at its place"
    handle.capture(False)
    assert not handle.plans()
    apply_encoder(model, blocks=(0, 1, 3), restore=True, **fields)
    restored = model(**inputs, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(restored, whole)


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
