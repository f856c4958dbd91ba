"""A pipeline with two denoisers: both merge, the report names each, and removal leaves no trace on
either.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Ideogram4Pipeline
from torch import Tensor, nn

from mame_sd import apply_mame, mame, remove_mame
from mame_sd.diffusion.apply_denoiser import denoiser_of, has_hooks
from tests.builders.transformers import TEXT, normal
from tests.matrix.models.registry import MODELS
from tests.matrix.two_denoisers import once, wan22


class Encoded(Ideogram4Pipeline):
    """With features of a prompt of `TEXT` tokens, which its own encoder would make of 13 layers."""

    def encode_prompt(
        self, prompt: Any, grid_h: int, grid_w: int, *given: Any, **named: Any
    ) -> Any:
        ids = self._prepare_ids([TEXT], grid_h, grid_w, TEXT, torch.device("cpu"))
        width = self.transformer.config.llm_features_dim
        features = normal(1, TEXT, width)
        return torch.cat([features, features.new_zeros(1, grid_h * grid_w, width)], 1), *ids


def test_both_transformers_of_ideogram_4_merge() -> None:
    """One makes the guided half of each step, the other the unguided one, of the image alone."""
    case = MODELS["Ideogram4Transformer2DModel"]
    transformers = [case.build().eval() for _ in range(2)]
    pipe = Encoded(FlowMatchEulerDiscreteScheduler(), None, None, None, *transformers)
    pipe.set_progress_bar_config(disable=True)

    def run() -> Tensor:
        output: Tensor = pipe(
            "a cat",
            height=128,
            width=192,
            num_inference_steps=2,
            guidance_scale=3.0,
            guidance_schedule=None,
            max_sequence_length=TEXT,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
            return_dict=False,
        )[0]
        return output

    before = run()
    handle = apply_mame(pipe, keep=0.5, min_tokens=1)
    assert not torch.equal(run(), before)
    layers = handle.report().layers
    assert {layer.name.partition(".")[0] for layer in layers if layer.merged} == {
        "transformer",
        "unconditional_transformer",
    }
    assert {(layer.tokens_in, layer.size) for layer in layers} == {(96, (8, 12))}
    remove_mame(pipe)
    assert torch.equal(run(), before)


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
