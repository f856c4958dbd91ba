"""A pipeline with two denoisers: both merge, the report names each, and removal leaves no trace on
either.
"""

from __future__ import annotations

import torch
from torch import nn

from mame_sd import apply_mame, mame, remove_mame
from mame_sd.diffusion.apply_denoiser import denoiser_of, has_hooks
from tests.matrix.two_denoisers import once, wan22


def test_both_transformers_of_wan_22_merge() -> None:
    pipe = wan22()
    before = once(pipe)
    handle = apply_mame(pipe, keep=0.5, min_tokens=1)
    merged = once(pipe)
    assert not torch.equal(merged, before)
    report = handle.report()
    assert {layer.name.partition(".")[0] for layer in report.layers if layer.merged} == {
        "transformer",
        "transformer_2",
    }
    assert {layer.calls for layer in report.layers} == {4}  # each has two steps, of two calls
    handle.active = False
    assert torch.equal(once(pipe), before)
    handle.active = True
    assert torch.equal(once(pipe), merged)
    remove_mame(pipe)
    assert not has_hooks(pipe)
    assert torch.equal(once(pipe), before)
    with mame(pipe, keep=0.5, min_tokens=1):
        assert torch.equal(once(pipe), merged)
    assert torch.equal(once(pipe), before)


def test_a_lone_denoiser_is_taken_as_it_is() -> None:
    pipe = wan22()
    assert isinstance(denoiser_of(pipe), nn.ModuleDict)
    pipe.transformer_2 = None
    assert denoiser_of(pipe) is pipe.transformer
