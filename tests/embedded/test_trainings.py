"""Trainings of embedded models run, resume to equal weights, and write what the libraries read.

They share one trainer (`scripts.training.recipe`), so that one of them is killed.
"""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import time
from inspect import isclass
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline, StableDiffusionPipeline
from safetensors import safe_open
from safetensors.torch import load_file

from mame_sd.embedded import model as subjects
from mame_sd.embedded.pipeline import embedded_pipeline
from mame_sd.eval.perception.data import open_images
from mame_sd.eval.perception.encoders import load_encoder
from mame_sd.eval.perception.heads import text_head
from mame_sd.perception.apply_encoder import apply_encoder
from mame_sd.runs.model_files import ModelChoice
from scripts.training import (
    contrast,
    pictures,
    train_clip,
    train_few_steps,
    train_transformer,
    train_unet,
    world,
)
from scripts.training.recipe import Recipe, run

ROOT = Path(__file__).parents[2]
PROMPT = "rocket on a light blue background"


def smoke(kind: type[Recipe], work: Path, *options: str) -> None:
    """Run the command with `--smoke --work WORK OPTIONS` in this process."""
    threads, exact = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        run(kind, None, ["--smoke", "--work", str(work), *options])
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(exact)


def weights(model: Path) -> dict[str, torch.Tensor]:
    return {
        f"{file.parent.name}.{key}": value
        for file in sorted(model.rglob("*.safetensors"))
        for key, value in load_file(file).items()
    }


def test_every_training_can_be_loaded() -> None:
    """Nothing else of them runs in `make test`."""
    for path in (ROOT / "scripts" / "training").glob("train_*.py"):
        module = importlib.import_module(f"scripts.training.{path.stem}")
        if path.stem == "train_photographs":  # goes by the clock, with a loop of its own
            assert callable(module.main)
            continue
        assert any(issubclass(kind, Recipe) for kind in vars(module).values() if isclass(kind))


@pytest.mark.training
def test_a_killed_and_resumed_training_gives_the_same_weights(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    smoke(train_transformer.JointRecipe, whole)
    command = [sys.executable, "-m", train_transformer.__name__, "--smoke", "--work", str(killed)]
    victim = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while victim.poll() is None and not (killed / "tokens256.pt").exists():
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    smoke(train_transformer.JointRecipe, killed)
    wanted, resumed = weights(whole / "model"), weights(killed / "model")
    assert sorted(wanted) == sorted(resumed)
    for name, value in wanted.items():
        assert torch.equal(resumed[name], value), name
    pipe = StableDiffusion3Pipeline.from_pretrained(whole / "model")
    pipe.set_progress_bar_config(disable=True)
    assert pipe(PROMPT, num_inference_steps=1).images[0].size == (256, 256)


@pytest.mark.training
def test_the_unets_training_writes_a_plain_pipeline(tmp_path: Path) -> None:
    smoke(train_unet.UNetRecipe, tmp_path, "--until", "patch8")
    latents = (tmp_path / "latents.pt").stat().st_mtime_ns
    smoke(train_unet.UNetRecipe, tmp_path)
    assert (tmp_path / "latents.pt").stat().st_mtime_ns == latents
    with safe_open(
        tmp_path / "model" / "unet" / "diffusion_pytorch_model.safetensors", "pt"
    ) as file:
        assert {"script_sha256", "seed", "steps"} <= set(file.metadata())
        assert all(file.get_tensor(key).isfinite().all() for key in list(file.keys()))
    pipe = StableDiffusionPipeline.from_pretrained(tmp_path / "model")
    pipe.set_progress_bar_config(disable=True)
    assert pipe(PROMPT, num_inference_steps=1).images[0].size == (256, 256)
    assert pipe.tokenizer.tokenize("jack-o-lantern on a pink background")[-2:] == [
        "pink</w>",
        "background</w>",
    ]


@pytest.mark.training
@pytest.mark.parametrize("form", [(), ("--straight",)])
def test_the_few_step_training_writes_a_lora(tmp_path: Path, form: tuple[str, ...]) -> None:
    smoke(train_few_steps.FewSteps, tmp_path, *form)
    pipe = embedded_pipeline("transformer")
    pipe.load_lora_weights(tmp_path / "model")
    assert len(pipe.transformer.peft_config) == 1


@pytest.mark.training
def test_the_clips_training_writes_a_clip_that_merges_and_reads_its_pictures(
    tmp_path: Path,
) -> None:
    smoke(train_clip.ClipRecipe, tmp_path)
    smoke(train_clip.ClipRecipe, tmp_path, "--draw", str(tmp_path / "pictures"), "--each", "2")
    encoder = load_encoder(ModelChoice(model=str(tmp_path / "model"), device="cpu"))
    images = open_images(tmp_path / "pictures")
    assert (len(images.classes), len(images.files)) == (6, 12)
    pixels, _ = pictures.draw(pictures.rng_of(0, "x", 0), subjects.glyph_names())
    made = encoder.inputs([pixels])["pixel_values"]
    torch.testing.assert_close(made, contrast.prepared([pixels], 256), rtol=0, atol=1e-5)
    handle = apply_encoder(encoder.model, keep=[0.5] * 3, blocks=(3, 6, 9))
    with torch.no_grad():
        head = text_head(encoder, images.classes, ["{} on a white background"])
        assert head.logits({"pixel_values": made}).shape == (1, 6)
    assert [block.tokens_kept for block in handle.report().layers][::3] == [257, 129, 65, 33]
    before, after = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True)["ema"]
        for name in ("tokens256", "crowd256")
    )
    same = {name: torch.equal(before[name], after[name]) for name in before}
    assert all(same[name] for name in same if name.startswith(("text_model", "text_projection")))
    assert not all(same.values())


@pytest.mark.training
def test_pictures_follow_from_their_number_and_keep_what_is_held_out() -> None:
    names = subjects.glyph_names()
    for index in range(6):
        (one, scene), (two, _) = (
            pictures.draw(pictures.rng_of(0, "x", index), names, crowd=(80, 83)) for _ in range(2)
        )
        assert np.array_equal(one, two)
        assert not scene.held_out
        assert pictures.draw(pictures.rng_of(0, "x", index), names, held_out=True)[1].held_out
        assert 80 <= len(scene.pieces) <= 83
        assert all(piece.glyph != scene.subject.glyph for piece in scene.pieces)
    scene = world.draw_scene(np.random.default_rng(0), 40)
    assert np.array_equal(world.render(scene), world.render(scene, 32)[32:-32, 32:-32])
