"""Samples by themselves and among others, and sizes that change between calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mame_sd import apply_mame, remove_mame
from tests.builders.tiny import run_unet, tiny_unet, unet_inputs


@pytest.mark.parametrize("fields", [{"keep": 0.5}, {"tau": -1.0}], ids=str)
def test_a_sample_alone_and_among_others_gives_the_same(fields: dict[str, Any]) -> None:
    unet = tiny_unet()
    apply_mame(unet, min_tokens=16, **fields)
    with torch.no_grad():
        both = run_unet(unet, batch=2)
        inputs = unet_inputs(unet, batch=2)
        alone = unet(
            inputs["sample"][:1], inputs["timestep"], inputs["encoder_hidden_states"][:1]
        ).sample
    torch.testing.assert_close(alone, both[:1], rtol=1e-4, atol=1e-5)


def test_sizes_may_change_between_calls() -> None:
    unet = tiny_unet()
    sizes = [(16, 16), (16, 24), (8, 16), (16, 16)]
    apply_mame(unet, keep=0.5, min_tokens=16)
    live = [run_unet(unet, height=h, width=w) for h, w in sizes]
    for (h, w), output in zip(sizes, live, strict=True):
        remove_mame(unet)
        apply_mame(unet, keep=0.5, min_tokens=16)
        assert torch.equal(run_unet(unet, height=h, width=w), output)
