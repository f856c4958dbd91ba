"""What merges where the settings leave it open: whole tokens in image transformers like the one
that was measured, keys and values elsewhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from diffusers import StableDiffusionPipeline, UNet2DConditionModel

from mame_sd import MaMeConfig, apply_mame
from mame_sd.config import Study
from mame_sd.diffusion.families.transformers import BUILT_IN, SHARE_BESIDE_TEXT, resolved, uniform
from mame_sd.eval.benchmark.rows import chosen_rows
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.methods import Merging
from mame_sd.runs.model_files import digest_of
from tests.builders.settings import nested
from tests.builders.tiny import save_tiny_pipeline, tiny_unet
from tests.matrix.transformers import ROWS

MODELS = {row.name: row for row in ROWS}
JOINT = ["Stable Diffusion 3", "AuraFlow"]


def merges(config: MaMeConfig) -> tuple[Any, ...]:
    return config.keep, config.tau, config.merge, config.weights


def test_families_that_were_measured_or_are_of_one_kind_with_it() -> None:
    assert [family.name for family in BUILT_IN if family.keep is not None] == JOINT


@pytest.mark.parametrize("name", JOINT)
def test_image_transformers_whose_tokens_carry_positions_merge_whole(name: str) -> None:
    model = MODELS[name].build()
    handle = apply_mame(model, study=Study(redraw=False), min_tokens=1)
    assert merges(handle.config) == (SHARE_BESIDE_TEXT, None, "qkv", "best")
    assert (handle.config.redraw, handle.config.min_tokens, handle.config.detail) == (
        False,
        1,
        True,
    )
    MODELS[name].run(model)
    merged = [entry for entry in handle.report().layers if entry.merged]
    assert merged
    assert all(
        entry.tokens_kept / entry.tokens_in == pytest.approx(SHARE_BESIDE_TEXT, abs=0.05)
        for entry in merged
    )


@pytest.mark.parametrize(
    "name",
    [
        "Flux",
        "Qwen-Image",
        "Wan (video)",
        "LTX-Video",
        "CogVideoX",
        "PixArt",
        "DiT",
        "HunyuanDiT",
        "Lumina-Next",
    ],
)
def test_others_merge_as_unets_do(name: str) -> None:
    assert resolved(MODELS[name].build(), MaMeConfig()) == MaMeConfig()
    assert resolved(tiny_unet(), MaMeConfig()) == MaMeConfig()


@pytest.mark.parametrize(
    "fields",
    [
        {"keep": 0.25},
        {"tau": 0.8},
        {"merge": "kv"},
        {"weights": "pick"},
        {"weights": "average"},
        {"preset": "plain"},
        {"preset": "default"},
        {"variant": "paper"},
    ],
    ids=str,
)
def test_what_is_given_decides(fields: dict[str, Any]) -> None:
    config = MaMeConfig(**nested(fields))
    assert resolved(MODELS["AuraFlow"].build(), config) == config


def test_settings_that_change_later_mean_what_they_mean_at_first() -> None:
    handle = apply_mame(MODELS["AuraFlow"].build(), min_tokens=1)
    changes: list[dict[str, Any]] = [
        {"keep": 0.5},
        {"keep": None},
        {"tau": 0.8},
        {"tau": None, "merge": "kv"},
        {"merge": None, "preset": "plain"},
        {"preset": None, "weights": "pick"},
        {"study": None, "seed": 3},
    ]
    asked = MaMeConfig(min_tokens=1)
    for change in changes:
        asked = asked.replace(**nested(change))
        with handle.using(**nested(change)):
            assert handle.config == resolved(handle.root, asked)
        handle.set(**nested(change))
        assert handle.config == resolved(handle.root, asked)
    assert merges(handle.config) == (SHARE_BESIDE_TEXT, None, "qkv", "best")
    handle.active = False
    handle.active = True
    handle.set(keep=0.25)
    assert merges(handle.config) == (0.25, None, "kv", "best")
    handle.set(MaMeConfig())
    assert merges(handle.config) == (SHARE_BESIDE_TEXT, None, "qkv", "best")


def test_runs_and_benchmarks_say_what_merged() -> None:
    class Pipe:
        transformer = MODELS["AuraFlow"].build()

    loaded = LoadedModel(pipe=Pipe(), identity={}, guidance=None)
    assert Merging(MaMeConfig()).on(loaded).describe()["mame"]["merge"] == "qkv"
    (baseline, default) = (row.on(loaded) for row in chosen_rows("mame-default"))
    assert baseline.config == {}
    assert default.config["mame"]["keep"] == SHARE_BESIDE_TEXT


def test_settings_beside_a_models_weights_are_its_default(tmp_path: Path) -> None:
    folder = save_tiny_pipeline(tmp_path / "tiny")
    pipe = StableDiffusionPipeline.from_pretrained(folder)
    before = digest_of(folder)
    assert apply_mame(pipe, min_tokens=16).config == MaMeConfig(min_tokens=16)
    rules = {"up_blocks.1": {"keep": 0.5, "merge": "kv"}}
    (folder / "mame.json").write_text(json.dumps({"layers": rules, "about": {"steps": 3}}))
    assert digest_of(folder) == before, "the same model"
    for target in (pipe, pipe.unet, UNet2DConditionModel.from_pretrained(folder, subfolder="unet")):
        handle = apply_mame(target, min_tokens=16)
        assert handle.config == MaMeConfig(min_tokens=16, layers=rules)
        for decided in ({"keep": 0.25}, {"preset": "default"}, {"merge": "kv"}):
            handle.set(MaMeConfig(**nested(decided)))
            assert handle.config == MaMeConfig(**nested(decided)), "what is given decides"
        handle.set(MaMeConfig(layers={"mid*": False}))
        assert handle.config == MaMeConfig(layers={"mid*": False})
        handle.set(uniform(handle.root, MaMeConfig(min_tokens=16)))
        assert handle.config == MaMeConfig(min_tokens=16, merge="kv")
    other = save_tiny_pipeline(tmp_path / "other")
    (other / "mame.json").write_text('{"layers": {"no.such": false}}')
    with pytest.raises(
        ValueError, match=r"layers: expected patterns of layers of UNet2D.* got 'no.such'"
    ):
        apply_mame(StableDiffusionPipeline.from_pretrained(other))
