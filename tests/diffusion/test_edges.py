"""Samples by themselves and among others, and sizes that change between calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mame_sd import apply_mame, remove_mame
from tests.builders.tiny import run_unet, tiny_unet
from tests.builders.transformers import normal


@pytest.mark.parametrize("fields", [{"keep": 0.4}, {"tau": -1.0}], ids=str)
def test_each_sample_of_a_batch_is_its_own(fields: dict[str, Any]) -> None:
    unet = tiny_unet().double()  # in fp32 rounding may decide between two nearly equal destinations
    apply_mame(unet, min_tokens=16, **fields)
    x, text = normal(3, 4, 8, 12).double(), normal(3, 7, 16).double()
    with torch.no_grad():
        together = unet(x, torch.tensor(500), text).sample
        alone = [unet(x[i : i + 1], torch.tensor(500), text[i : i + 1]).sample for i in range(3)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-9, atol=1e-9)


def test_sizes_may_change_between_calls() -> None:
    unet = tiny_unet()
    sizes = [(16, 16), (16, 24), (8, 16), (16, 16)]
    apply_mame(unet, keep=0.5, min_tokens=16)
    live = [run_unet(unet, height=h, width=w) for h, w in sizes]
    for (h, w), output in zip(sizes, live, strict=True):
        remove_mame(unet)
        apply_mame(unet, keep=0.5, min_tokens=16)
        assert torch.equal(run_unet(unet, height=h, width=w), output)
