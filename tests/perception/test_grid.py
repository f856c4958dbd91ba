"""Patches as a grid: in the first block that merges, of any sides, and where there is none."""

from __future__ import annotations

import pytest
import torch

from mame_sd.perception.apply_encoder import apply_encoder, remove_encoder
from tests.builders.perception import AROUND, NAMED, PATCH, SIDE, VIT
from tests.perception.oracle import merged_oracle


@torch.no_grad()
def test_a_grid_is_one_in_the_first_block_alone() -> None:
    model, wide = VIT.build(), torch.randn(1, 3, SIDE, 2 * SIDE)
    handle = apply_encoder(model, keep=(0.25, 0.25), blocks=(0, 1))
    handle.capture()
    model(wide, interpolate_pos_encoding=True)
    first, second = handle.report().layers[:2]
    assert (first.tokens_kept, first.note) == (1 + 18, "")
    # every other one of rows of 12
    assert handle.plans()[0].kept[0, 1:9].tolist() == [1, 3, 5, 7, 9, 11, 25, 27]
    assert (second.tokens_kept, second.note) == (1 + 5, "")
    row = NAMED["ViTMAEModel"]
    handle = apply_encoder(row.build(), keep=0.5, blocks=2)
    row.call(handle.root, row.batch())
    first, second = handle.report().layers[:2]
    assert "height and width unknown" in first.note
    assert not second.note


@torch.no_grad()
def test_by_default_a_grid_of_any_sides_is_the_oracle_s() -> None:
    model, tall = VIT.build().double(), torch.randn(2, 3, 7 * PATCH, 5 * PATCH).double()
    want = merged_oracle(model, VIT, apply_encoder(model).configs, True, (7, 5))
    handle = apply_encoder(model)
    handle.capture()
    got = model(tall, interpolate_pos_encoding=True).logits
    assert handle.plans()[1].body.cells.kept == 9  # a quarter of 7 x 5, to the nearest
    remove_encoder(model)
    torch.testing.assert_close(
        got, want(tall, interpolate_pos_encoding=True).logits, rtol=1e-9, atol=1e-9
    )


@pytest.mark.skipif(AROUND, reason="refused around whole blocks")
def test_a_checkpoint_computes_again_by_its_own_images_grid() -> None:
    grads = []
    for checkpoint in (False, True):
        model = VIT.build().train()
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        apply_encoder(model, keep=0.6)
        images = torch.randn(2, 3, 9 * PATCH, 4 * PATCH, generator=torch.Generator().manual_seed(0))
        both = [
            model(one, interpolate_pos_encoding=True).logits
            for one in (images, images.mT.contiguous())
        ]
        sum(logits.square().sum() for logits in both).backward()
        grads.append([part.grad for part in model.parameters() if part.grad is not None])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(other, one)
