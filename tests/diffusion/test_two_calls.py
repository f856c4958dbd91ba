"""Guidance in two calls, of models and of the pipelines that call twice: both merge by the first
one's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import pytest
import torch
from diffusers.guiders import ClassifierFreeGuidance
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.modular_pipelines import PipelineState
from diffusers.modular_pipelines.qwenimage.denoise import QwenImageDenoiseStep
from torch import Tensor

from mame_sd import apply_mame
from mame_sd.core.merge import Groups
from tests.builders.pipelines import quiet
from tests.builders.tiny import one_level_unet, run_unet
from tests.builders.transformers import TEXT, halves, normal, run
from tests.matrix.transformers import ROWS

MODELS = {row.name: row for row in ROWS}


@pytest.mark.parametrize("name", ["Flux", "Wan (video)", "Stable Diffusion 3.5"])
def test_two_calls_give_what_a_batch_of_both_gives(name: str, planned: list[Groups]) -> None:
    row = MODELS[name]
    model, inputs = row.build(), dict(row.inputs)
    inputs["hidden_states"] = inputs["hidden_states"][1:].repeat_interleave(2, 0)
    guided, unguided = halves(inputs)
    rules = {"*0*": {"keep": 0.4, "fit_queries": 0}}
    handle = apply_mame(model, min_tokens=1, keep=0.25, layers=rules)
    both = run(inputs, model)
    planned.clear()
    first = run(guided, model)
    made = len(planned)
    second = run(unguided, model)
    assert len(planned) == made > 0
    torch.testing.assert_close(torch.cat([second, first]), both)
    unguided["hidden_states"] = unguided["hidden_states"].clone()  # equal, but who knows
    run(unguided, model)
    assert len(planned) == 2 * made
    assert all(entry.calls == 4 for entry in handle.report().layers)


def test_a_layer_that_a_model_calls_twice_merges_anew_each_time(planned: list[Groups]) -> None:
    row = MODELS["Stable Diffusion 3.5"]
    model, inputs = row.build(), dict(row.inputs)
    first, *others = model.transformer_blocks
    model.transformer_blocks = torch.nn.ModuleList([first, first, *others])
    inputs["hidden_states"] = inputs["hidden_states"][1:].repeat_interleave(2, 0)
    handle = apply_mame(model, min_tokens=1, keep=0.25)
    for number, half in enumerate(halves(inputs), 1):
        run(half, model)
        calls = [entry.calls for entry in handle.report().layers]
        assert max(calls) == 2 * number
        assert len(planned) == sum(calls) / number


class Twice(AttnProcessor2_0):
    """Attends to the tokens, and to the same ones in another order."""

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        once = super().__call__(attn, hidden_states, *args, **kwargs)
        turned = super().__call__(attn, hidden_states.flip(1), *args, **kwargs)
        return once + turned


def test_each_of_two_attentions_of_a_layer_has_its_own_plan(planned: list[Groups]) -> None:
    outputs, made = [], []
    for shared in (True, False):
        unet = one_level_unet()
        unet.set_attn_processor(Twice())
        handle = apply_mame(unet, keep=0.5, min_tokens=16, share_guidance_plan=shared)
        planned.clear()
        outputs.append(run_unet(unet))
        made.append(len(planned))
        assert all(layer.merged for layer in handle.report().layers)
    assert torch.equal(*outputs)
    assert made[0] == made[1] > 0


def pipeline(name: str, row: str, **parts: Any) -> Any:
    """diffusers' pipeline of that name around the tiny transformer of a row, without text encoders
    and autoencoder.
    """
    kind = getattr(diffusers, name)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return quiet(kind(transformer=MODELS[row].build(), vae=None, scheduler=scheduler, **parts))


def texts(shorter: int = 1) -> dict[str, Tensor]:
    """Of the prompt, and of the negative one with fewer tokens."""
    return {
        "prompt_embeds": normal(1, TEXT, 16),
        "negative_prompt_embeds": normal(1, TEXT - shorter, 16, seed=1),
    }


MASKS = {
    f"{name}_mask": torch.ones(1, text.shape[1], dtype=torch.long) for name, text in texts().items()
}
NO_TEXT = dict.fromkeys(("text_encoder", "tokenizer"))
PIPELINES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "Qwen-Image": (
        partial(pipeline, "QwenImagePipeline", "Qwen-Image", **NO_TEXT),
        {**texts(), **MASKS, "true_cfg_scale": 3.0},
    ),
    "Wan": (
        partial(pipeline, "WanPipeline", "Wan (video)", **NO_TEXT),
        {**texts(), "num_frames": 9},
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_that_call_twice_plan_once(name: str, planned: list[Groups]) -> None:
    build, given = PIPELINES[name]
    pipe = build()
    handle = apply_mame(pipe, keep=0.25, min_tokens=1)
    for pairs, plans in ((True, 1), (False, 2)):
        handle.set(share_guidance_plan=pairs)
        handle.reset()
        planned.clear()
        pipe(**given, height=128, width=192, num_inference_steps=2, output_type="latent")
        layers = [entry for entry in handle.report().layers if entry.merged]
        assert layers, "something merges"
        assert all(entry.calls == 4 for entry in layers)
        assert len(planned) == plans * 2 * len(layers)


def modular() -> tuple[Any, Callable[[], Any]]:
    """The denoising of Qwen-Image's modular pipeline, whose guider calls the model for each prompt:
    three steps of it.
    """
    pipe = QwenImageDenoiseStep().init_pipeline()
    transformer, scheduler = (
        MODELS["Qwen-Image"].build(),
        diffusers.FlowMatchEulerDiscreteScheduler(),
    )
    pipe.update_components(
        transformer=transformer, scheduler=scheduler, guider=ClassifierFreeGuidance()
    )
    scheduler.set_timesteps(3)
    state = PipelineState()
    attended = {f"{name}_mask": torch.ones(1, TEXT, dtype=torch.long) for name in texts()}
    for name, value in {**texts(0), **attended, "img_shapes": [[(1, 8, 12)]]}.items():
        state.set(name, value, "denoiser_input_fields")
    latents = normal(1, 96, 16)
    return pipe, lambda: pipe(
        state, latents=latents, timesteps=scheduler.timesteps, num_inference_steps=3
    )


def test_a_modular_pipeline_plans_once(planned: list[Groups]) -> None:
    pipe, generate = modular()
    handle = apply_mame(pipe, keep=0.25, min_tokens=1)
    generate()
    layers = [entry for entry in handle.report().layers if entry.merged]
    assert layers
    assert all(entry.calls == 6 for entry in layers)
    assert len(planned) == 3 * len(layers)
