"""Test StableDiffusionMaMePipeline and its saved settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline

from mame_sd import MaMeConfig, apply_mame, remove_mame
from mame_sd.cli import app as cli
from mame_sd.diffusion.saved_setting import resolve_setting
from mame_sd.pipelines import StableDiffusionMaMePipeline
from tests.builders.pipelines import mame_pipeline, quiet
from tests.builders.single_file import save_single_file
from tests.builders.tiny import generate, one_level_unet, run_unet, tiny_components, tiny_pipeline

FIELDS = {"min_tokens": 40}
ROOT = Path(__file__).parents[2]


def test_a_batch_without_guidance_by_a_scheduler_that_calls_twice() -> None:
    pipe = mame_pipeline("heun")
    call = {"prompt": ["a red key"] * 2, "guidance_scale": 0.0, "height": 24, "width": 40}
    merged = generate(pipe, **call)
    plain = generate(tiny_pipeline("heun"), **call)
    assert merged.shape == (2, 3, 24, 40)
    assert torch.isfinite(merged).all()
    assert not torch.equal(merged, plain)
    assert torch.equal(generate(pipe, tau=None, **call), plain)
    assert pipe.mame is not None
    report = pipe.mame.report()
    assert {layer.size for layer in report.layers} == {(12, 20), (6, 10)}
    assert {layer.calls for layer in report.layers} == {3}


def test_call_argument_lasts_for_that_call_also_when_it_raises() -> None:
    pipe = mame_pipeline()
    merged = generate(pipe)
    kept = generate(pipe, tau=None, keep=0.4)
    assert torch.equal(kept, generate(pipe, keep=0.4))
    assert not torch.equal(kept, merged)
    assert torch.equal(generate(pipe), merged)

    def fail(*_: Any) -> None:
        raise KeyError

    for tau in (None, 0.9):
        with pytest.raises(KeyError):
            generate(pipe, tau=tau, callback_on_step_end=fail)
        assert pipe.tau == 0.2
        assert torch.equal(generate(pipe), merged)
        assert torch.equal(run_unet(pipe.unet), run_unet(tiny_pipeline().unet))


def test_default_is_the_measured_one_and_none_is_off() -> None:
    pipe = mame_pipeline(tau="default")
    assert pipe.mame_config == MaMeConfig(**FIELDS)
    assert StableDiffusionMaMePipeline(**tiny_components()).mame_config == MaMeConfig()
    assert torch.equal(generate(pipe), generate(mame_pipeline(tau=None), tau="default"))
    off = mame_pipeline(tau=None)
    assert off.mame_config is None
    assert torch.equal(generate(off), generate(tiny_pipeline()))
    assert off.mame is None


def test_set_mame_lasts() -> None:
    pipe = mame_pipeline()
    pipe.set_mame(keep=0.4)
    assert (pipe.tau, pipe.keep) == (None, 0.4)
    with pytest.raises(ValueError, match="keep"):
        pipe.set_mame(keep=7)
    assert pipe.keep == 0.4
    pipe.set_mame(tau=None)
    assert pipe.mame_config is None
    pipe.set_mame(tau="default", mame_config={"tile_size": 8})
    assert pipe.mame_config == MaMeConfig(tile_size=8)


def test_bad_settings() -> None:
    pipe = mame_pipeline()
    for settings, message in (
        ({"tau": 1.5}, "tau: expected"),
        ({"tau": "often"}, "'often'"),
        ({"tau": 0.5, "keep": 0.5}, "got both"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(pipe, **settings)
    with pytest.raises(ValueError, match="mni_tokens"):
        resolve_setting(None, None, {"mni_tokens": 3})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a pipeline with a seed among its settings."""
    folder = tmp_path_factory.mktemp("saved")
    mame_pipeline(mame_config={**FIELDS, "seed": 3}).save_pretrained(folder)
    return folder


def test_saves_loads_and_overrides(saved: Path) -> None:
    pipe = mame_pipeline(mame_config={**FIELDS, "seed": 3})
    entry = json.loads((saved / "model_index.json").read_text())["_mame"]
    assert entry == {"tau": 0.2, "keep": None, "mame_config": {"min_tokens": 40, "seed": 3}}
    load = StableDiffusionMaMePipeline.from_pretrained
    again = quiet(load(saved))
    assert (again.tau, again.mame_config) == (0.2, pipe.mame_config)
    assert torch.equal(generate(again), generate(pipe))
    assert load(saved, tau=None).mame_config is None
    kept = quiet(load(saved, tau=None, keep=0.5))
    assert (kept.tau, kept.keep) == (None, 0.5)
    assert torch.equal(generate(kept, min_tokens=4096), generate(kept, tau=None))
    with pytest.raises(ValueError, match=r"expected tau or keep.*give it as None"):
        load(saved, keep=0.5)


def test_diffusers_loads_what_is_saved_as_a_plain_pipeline(saved: Path) -> None:
    index = json.loads((saved / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionPipeline"
    for loader in ("StableDiffusionPipeline", "AutoPipelineForText2Image"):
        plain = getattr(diffusers, loader).from_pretrained(saved)
        assert type(plain) is StableDiffusionPipeline
    assert torch.equal(generate(quiet(plain)), generate(tiny_pipeline()))
    with pytest.raises((OSError, ValueError), match="nowhere"):
        StableDiffusionMaMePipeline.from_pretrained(str(saved / "nowhere"))


def test_every_way_of_loading_takes_every_field(saved: Path) -> None:
    load = StableDiffusionMaMePipeline.from_pretrained
    loaded = load(saved, min_tokens=48)
    fields = {"tau": 0.2, "seed": 3, "min_tokens": 48}
    assert loaded.mame_config == MaMeConfig(**fields)
    made = StableDiffusionMaMePipeline.from_pipe(loaded, seed=4)
    assert made.mame_config == MaMeConfig(**{**fields, "seed": 4})
    with pytest.raises(ValueError, match="min_tokens: expected"):
        load("no/such/folder", min_tokens=0)  # before anything is loaded
    with pytest.raises(ValueError, match="tau: expected"):
        StableDiffusionMaMePipeline.from_single_file("no/such/file", mame_config={"tau": "often"})
    with pytest.raises((OSError, ValueError), match="fp16"):  # no such variant of weights
        load(saved, variant="fp16")


@pytest.mark.filterwarnings("ignore")
def test_from_single_file(model_folder: Path, tmp_path: Path) -> None:
    base = tiny_pipeline()
    pipe = quiet(
        StableDiffusionMaMePipeline.from_single_file(
            str(save_single_file(base, tmp_path / "model.safetensors")),
            config=str(model_folder),
            local_files_only=True,
            tau=0.2,
            mame_config=FIELDS,
            text_encoder=base.text_encoder,  # UNet and VAE come out of the file
            tokenizer=base.tokenizer,
            scheduler=base.scheduler,
            safety_checker=None,
        )
    )
    assert type(pipe) is StableDiffusionMaMePipeline
    assert pipe.unet is not base.unet
    assert torch.equal(generate(pipe), generate(mame_pipeline()))


def test_from_pipe_shares_the_unet_but_not_the_merging() -> None:
    base = tiny_pipeline()
    plain = generate(base)
    pipe = quiet(StableDiffusionMaMePipeline.from_pipe(base, tau=0.2, mame_config=FIELDS))
    assert pipe.unet is base.unet
    merged = generate(pipe)
    assert torch.equal(merged, generate(mame_pipeline()))
    assert torch.equal(generate(base), plain)
    other = quiet(StableDiffusionMaMePipeline.from_pipe(pipe, keep=0.4, tau=None))
    kept = generate(other)
    assert not torch.equal(kept, merged)
    assert torch.equal(generate(pipe), merged)
    assert torch.equal(generate(other), kept)
    assert torch.equal(generate(base), plain)


def test_hooks_of_apply_mame_step_back_and_return() -> None:
    pipe = mame_pipeline()
    merged = generate(pipe)
    handle = apply_mame(pipe, keep=0.4, **FIELDS)
    hooked = generate(pipe, tau=None)  # off: the base pipeline runs, with the hooks on this UNet
    assert not torch.equal(hooked, generate(tiny_pipeline()))
    assert torch.equal(generate(pipe), merged)
    assert handle.installed
    assert torch.equal(generate(pipe, tau=None), hooked)
    remove_mame(pipe)
    assert torch.equal(generate(pipe, tau=None), generate(tiny_pipeline()))
    assert torch.equal(generate(pipe), merged)


@pytest.mark.parametrize(
    "place", ["pipelines/stable_diffusion_mame.py", "examples/mame_stable_diffusion"]
)
def test_custom_pipeline(
    place: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.utils import dynamic_modules_utils

    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    pipe = quiet(
        DiffusionPipeline.from_pretrained(
            model_folder,
            custom_pipeline=str(ROOT / place),
            trust_remote_code=True,
            tau=0.2,
            mame_config=FIELDS,
        )
    )
    assert type(pipe).__name__ == "StableDiffusionMaMePipeline"
    assert torch.equal(generate(pipe), generate(mame_pipeline()))


@pytest.mark.compiles
def test_a_compiled_unet_is_not_compiled_again_for_every_call() -> None:
    torch._dynamo.reset()
    pipe = mame_pipeline(tau=None, keep=0.4, unet=one_level_unet())
    merged, plain = generate(pipe), generate(pipe, keep=None)
    block = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0]
    block.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(generate(pipe), merged, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(generate(pipe, keep=None), plain, rtol=1e-4, atol=1e-4)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(generate(pipe), merged, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(generate(pipe, keep=None), plain, rtol=1e-4, atol=1e-4)
    assert pipe.mame is not None
    assert {layer.calls for layer in pipe.mame.report().layers} == {2}


def test_commands_say_that_they_do_not_read_what_was_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mame_pipeline(tau=0.3, mame_config={"min_tokens": 16}).save_pretrained(tmp_path / "model")
    words = ["generate", "key", "--steps", "1", "--device", "cpu", "--min-tokens", "16"]
    assert cli.run([*words, "--model", str(tmp_path / "model"), "--out", str(tmp_path / "a")]) == 0
    assert "note: StableDiffusionMaMePipeline saved its setting" in capsys.readouterr().err
