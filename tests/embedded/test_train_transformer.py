"""The transformer's training runs through, resumes to the very same weights, and trains what the
pipeline computes.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline
from safetensors.torch import load_file

from scripts.training import growth, joint, joint_export, train_transformer, world
from tests.builders.trainings import smoke

ROOT = Path(__file__).parents[2]


def start(work: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "scripts.training.train_transformer",
        "--smoke",
        "--work",
        str(work),
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def weights(model: Path) -> dict[str, torch.Tensor]:
    return {
        f"{f.parent.name}.{k}": v
        for f in sorted(model.rglob("*.safetensors"))
        for k, v in load_file(f).items()
    }


@pytest.mark.training
def test_a_killed_and_resumed_training_gives_the_same_weights(tmp_path: Path) -> None:
    smoke(train_transformer, tmp_path / "whole")
    victim = start(tmp_path / "killed")
    while victim.poll() is None and not (tmp_path / "killed" / "tokens256.pt").exists():
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    smoke(train_transformer, tmp_path / "killed")
    whole, resumed = weights(tmp_path / "whole" / "model"), weights(tmp_path / "killed" / "model")
    assert sorted(whole) == sorted(resumed)
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "whole" / "model")
    assert type(pipe) is StableDiffusion3Pipeline
    pipe.set_progress_bar_config(disable=True)
    assert pipe("rocket on a light blue background", num_inference_steps=1).images[0].size == (
        256,
        256,
    )
    assert (
        sum(f.stat().st_size for f in (tmp_path / "whole" / "model" / "transformer").iterdir())
        < 30e6
    )


def moved(seed: int) -> joint.Denoiser:
    """A denoiser in which nothing is zero."""
    torch.manual_seed(seed)
    model = joint.new_denoiser(
        joint.Stage("s", 64, 4, 1, 1, 0.0, 1.0, (1, 0)), joint.joint_tokenizer()
    ).eval()
    with torch.no_grad():
        for parameter in model.transformer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@torch.no_grad()
def test_counting_the_idle_tokens_is_what_the_pipeline_computes() -> None:
    model, tokenizer = moved(0), joint.joint_tokenizer()
    prompts = ["rocket on a red brick background", "jack-o-lantern on a white background"]
    tokens = tokenizer(prompts, padding="max_length", return_tensors="pt").input_ids
    noisy, sigma = torch.randn(2, 4, 64, 64), torch.tensor([0.3, 0.9])
    pipe = joint_export.new_pipeline(model, tokenizer)
    words, _, pooled, _ = pipe.encode_prompt(prompts, None, None, do_classifier_free_guidance=False)
    assert words.shape[1] == joint.TEXT_LENGTH + joint.IDLE
    wanted = pipe.transformer(noisy, words, pooled, sigma * 1000).sample
    torch.testing.assert_close(model(noisy, sigma, tokens), wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_least_squares_finds_the_weights_again() -> None:
    layer = torch.nn.Conv2d(4, 8, 2, 2)
    noisy = torch.randn(4, 4, 16, 16)
    fitted = torch.nn.Conv2d(4, 8, 2, 2)
    targets = layer(noisy).flatten(2).transpose(1, 2).flatten(0, 1)
    growth.refit(fitted, growth.patches(noisy, 2), targets, growth.affine(fitted))
    torch.testing.assert_close(fitted(noisy), layer(noisy), rtol=0.02, atol=0.02)


def test_patches_of_the_output_are_in_the_order_of_the_transformer() -> None:
    transformer = joint.new_transformer(16, 4)
    seen: list[torch.Tensor] = []
    wanted = torch.randn(1, 4, 16, 16)
    with torch.no_grad():
        handle = transformer.proj_out.register_forward_hook(
            lambda *_: growth.output_patches(wanted, 4)[None]
        )
        seen.append(
            transformer(wanted, torch.zeros(1, 2, 256), torch.zeros(1, 256), torch.zeros(1)).sample
        )
        handle.remove()
    assert torch.equal(seen[0], wanted)


@pytest.mark.parametrize("pairs", [0.0, 1.0])
def test_scenes_follow_from_the_generator_and_keep_what_is_held_out(pairs: float) -> None:
    for seed in range(8):
        one, two = (world.draw_scene(np.random.default_rng(seed), 40, pairs) for _ in range(2))
        assert one == two
        assert not one.held_out
        assert world.draw_scene(np.random.default_rng(seed), 40, pairs, held_out=True).held_out
        assert np.array_equal(world.render(one), world.render(one, 32)[32:-32, 32:-32])
