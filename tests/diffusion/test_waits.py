"""Nothing on the way of `keep=` waits for the device, so that a CUDA graph can be captured of it:
models run on tensors that have no values, and every reading of one raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.gpu_models import flux, sd3, unet, wan
from benchmarks.launches import META, on_card, pretended
from mame_sd import mame
from tests.builders.tiny import one_level_unet

SMALL = {"heads": 2, "text": 7}
CASES = {
    "UNet": unet(one_level_unet().config, 128, torch.float32),
    "SD3": sd3((8, 12), layers=2, **SMALL),
    "FLUX": flux((8, 12), layers=(1, 1), batch=2, **SMALL),
    "Wan": wan((3, 4, 6), layers=1, batch=2, **SMALL),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_waits_for_the_device(name: str) -> None:
    case = CASES[name]
    model = on_card(case.build(META))
    named, known = case.inputs(model)
    with mame(model, keep=0.25, min_tokens=16) as handle:
        for values in known, {}:  # a captured call has one before it, which may read
            with pretended(values):
                output = model(**named, return_dict=False)[0]
        merged = [layer for layer in handle.report().layers if layer.share < 1]
    assert output.is_meta
    assert len(merged) >= 1
    assert all(layer.calls == 2 for layer in merged)


@pytest.mark.parametrize(
    "wait", [lambda x: x.sum().item(), lambda x: x[x > 0]], ids=["item", "mask"]
)
def test_a_wait_would_be_seen(wait: Callable[[Any], Any]) -> None:
    with pretended(), pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)meta"):
        wait(torch.ones(3, device=META))
