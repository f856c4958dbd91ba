"""The trainings of the embedded models run through, resume to the very same weights, and write what
the libraries read. They share one trainer (`scripts.training.recipe`), so one of them is killed.
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
from mame_sd.eval.perception.data import open_images
from mame_sd.eval.perception.encoders import load_encoder
from mame_sd.eval.perception.heads import text_head
from mame_sd.perception.apply_encoder import apply_encoder
from mame_sd.runs.model_files import ModelChoice
from scripts.training import (
    contrast,
    growth,
    joint,
    pictures,
    train_clip,
    train_transformer,
    train_unet,
    world,
)
from scripts.training.loop import CosineStage, Stage
from scripts.training.recipe import Recipe, refit, run
from scripts.training.text import Tokens

ROOT = Path(__file__).parents[2]
PROMPT = "rocket on a light blue background"


def smoke(kind: type[Recipe], work: Path, *options: str) -> None:
    """What the command with `--smoke --work WORK OPTIONS` does, in this process."""
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
        assert any(issubclass(kind, Recipe) for kind in vars(module).values() if isclass(kind))


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        (train_clip.ClipRecipe, [], "expected --work or --draw, got neither"),
        (train_unet.UNetRecipe, ["--draw", "x"], "--draw: this model is not measured on pictures"),
    ],
)
def test_what_a_training_cannot_do_is_said_in_a_line(
    kind: type[Recipe], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(kind, None, words)
    assert message in capsys.readouterr().err


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
    assert [block.tokens_kept for block in handle.report().blocks][::3] == [257, 129, 65, 33]
    before, after = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True)["ema"]
        for name in ("tokens256", "crowd256")
    )
    same = {name: torch.equal(before[name], after[name]) for name in before}
    assert all(same[name] for name in same if name.startswith(("text_model", "text_projection")))
    assert not all(same.values())


@pytest.mark.training
def test_the_rate_rises_stays_and_falls() -> None:
    stage = Stage(name="s", steps=100, batch=1, lr=2.0, warmup=10, decay=0.2, least=0.01)
    assert [stage.rate(step) for step in (0, 9, 80, 90, 100)] == [0.2, 2.0, 2.0, 1.0, 0.02]
    half = CosineStage(name="s", steps=100, batch=1, lr=2.0, warmup=10, lr_end=1.0)
    assert [half.rate(step) for step in (0, 50, 100)] == pytest.approx([0.2, 1.5, 1.0])


@torch.no_grad()
@pytest.mark.training
def test_counting_the_idle_tokens_is_what_the_pipeline_computes() -> None:
    tokenizer = joint.joint_tokenizer()
    torch.manual_seed(0)
    model = joint.new_denoiser(train_transformer.STAGES[1], tokenizer).eval()
    for parameter in model.transformer.parameters():  # nothing is zero
        parameter.add_(torch.randn_like(parameter) * 0.05)
    prompts = ["rocket on a red brick background", "jack-o-lantern on a white background"]
    tokens = tokenizer(prompts, padding="max_length", return_tensors="pt").input_ids
    noisy, sigma = torch.randn(2, 4, 64, 64), torch.tensor([0.3, 0.9])
    pipe = train_transformer.new_pipeline(model, tokenizer)
    words, _, pooled, _ = pipe.encode_prompt(prompts, None, None, do_classifier_free_guidance=False)
    assert words.shape[1] == joint.TEXT_LENGTH + joint.IDLE
    wanted = pipe.transformer(noisy, words, pooled, sigma * 1000).sample
    torch.testing.assert_close(model(noisy, sigma, tokens), wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.training
def test_a_finer_model_starts_as_the_coarse_one() -> None:
    layer, fitted, noisy = torch.nn.Conv2d(4, 8, 2, 2), torch.nn.Conv2d(4, 8, 2, 2), normal()
    targets = layer(noisy).flatten(2).transpose(1, 2).flatten(0, 1)
    refit(fitted, growth.patches(noisy, 2), targets, growth.affine(fitted))
    torch.testing.assert_close(fitted(noisy), layer(noisy), rtol=0.02, atol=0.02)
    transformer = joint.new_transformer(16, 4)
    wanted = growth.output_patches(noisy, 4).unflatten(0, (4, -1))
    transformer.proj_out.register_forward_hook(lambda *_: wanted)
    words, pooled, time_ = torch.zeros(4, 2, 256), torch.zeros(4, 256), torch.zeros(4)
    assert torch.equal(transformer(noisy, words, pooled, time_).sample, noisy)
    tokenizer = joint.joint_tokenizer()
    coarse, fine = (contrast.new_model(s, tokenizer).eval() for s in train_clip.STAGES[:2])
    contrast.grow(coarse, fine)
    one, two = coarse.state_dict(), fine.state_dict()
    assert all(torch.equal(one[n], two[n]) for n in one if one[n].shape == two[n].shape)
    key = "vision_model.embeddings.position_embedding.weight"
    centre = two[key][1:].unflatten(0, (16, 16))[7:9, 7:9].mean((0, 1))
    expected = one[key][1:].unflatten(0, (8, 8))[3:5, 3:5].mean((0, 1))
    torch.testing.assert_close(centre, expected, rtol=1e-4, atol=1e-6)


def normal() -> torch.Tensor:
    return torch.randn(4, 4, 16, 16, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.training
def test_the_loss_is_clip_s_where_captions_differ_and_a_batch_has_few_grounds() -> None:
    stage = contrast.ClipStage(name="s", side=128, steps=1, batch=4, lr=0, grounds=2)
    tokens, names = Tokens(joint.joint_tokenizer()), subjects.glyph_names()
    model = contrast.new_model(stage, tokens.tokenizer).eval()
    images, captions, _ = batch = contrast.draw_batch(names, stage, 0, 0)
    assert len(set(captions)) == 4
    assert len({text.split(" on a")[1] for text in captions}) <= 2
    ids, seen = (torch.stack([tokens[c] for c in captions]), contrast.prepared(images, 128))
    wanted = model(input_ids=ids, pixel_values=seen, return_loss=True).loss
    got = contrast.contrastive_loss(model, tokens, stage, batch)
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)  # bfloat16


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
