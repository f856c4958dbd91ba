"""Test settings of single layers by pattern, and the errors that name a rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mame_sd import MaMeAttnProcessor, MaMeConfig, apply_mame
from mame_sd.pipelines import StableDiffusionMaMePipeline
from tests.builders.tiny import run_unet, save_tiny_pipeline, tiny_unet, unet_inputs

SMALL: dict[str, Any] = {"min_tokens": 16, "keep": 0.5}
UP, DOWN = "up_blocks.1", "down_blocks.0"


def shares(handle: Any) -> dict[str, float]:
    return {layer.name: layer.share for layer in handle.report().layers}


def test_each_layer_merges_as_its_own_settings_do_alone() -> None:
    unet = tiny_unet()
    with apply_mame(
        unet, **SMALL, layers={UP: {"keep": 0.25}, "mid*": False, f"{DOWN}.*.attn1": False}
    ) as handle:
        mixed, found = run_unet(unet), shares(handle)
        left = {
            layer.name
            for layer in handle.report().layers
            if layer.reason == "left unmerged by layers"
        }
    assert {share for name, share in found.items() if name.startswith(UP)} == {0.25}
    assert {share for name, share in found.items() if name.startswith((DOWN, "mid"))} == {1.0}
    assert left == {name for name in found if name.startswith((DOWN, "mid"))}
    assert any(share == 0.5 for share in found.values())
    with apply_mame(
        unet,
        **SMALL,
        layers={name: {"keep": share} if share < 1 else False for name, share in found.items()},
    ):
        assert torch.equal(run_unet(unet), mixed), "the same settings, one pattern for each layer"
    with apply_mame(unet, **SMALL, layers={"*": {"keep": 0.25}}):
        every = run_unet(unet)
    with apply_mame(unet, **{**SMALL, "keep": 0.25}):
        assert torch.equal(run_unet(unet), every), "one rule for all layers is no rule"
    with apply_mame(unet, **SMALL):
        assert not torch.equal(run_unet(unet), mixed)


def test_rules_for_another_model_are_refused_and_change_nothing() -> None:
    unet = tiny_unet()
    handle = apply_mame(unet, **SMALL)
    wishes: list[tuple[dict[str, Any], str]] = [
        ({"layers": {"blocks.7": False}}, r"expected patterns of layers of UNet2D.* 'blocks.7'"),
        (
            {"calibrated_for": "Other"},
            r"found for UNet2DConditionModel with 7 .*, got ones for Other",
        ),
    ]
    for fields, message in wishes:
        for call in (handle.set, lambda **given: apply_mame(unet, **SMALL, **given)):
            with pytest.raises(ValueError, match=message):
                call(**fields)
    assert handle.installed
    assert handle.config == MaMeConfig(**SMALL)
    with pytest.raises(
        ValueError, match=r"layers: expected none.*processor does not know the names"
    ):
        MaMeAttnProcessor(layers={UP: False})


def test_files_hold_rules_and_every_way_in_takes_them(tmp_path: Path) -> None:
    unet = tiny_unet()
    rules = {UP: {"keep": 0.25, "fit_queries": 8}, DOWN: False}
    handle = apply_mame(unet, **SMALL, layers=rules)
    expected = run_unet(unet)
    file = tmp_path / "settings.json"
    about = {"model": "tiny", "steps": 2}
    file.write_text(
        json.dumps({**SMALL, "layers": rules, "calibrated_for": handle.described, "about": about})
    )
    with apply_mame(unet, file):
        assert torch.equal(run_unet(unet), expected)
    with apply_mame(unet, str(file), keep=0.75) as other:
        run_unet(unet)
        assert 0.75 in shares(other).values()
        assert 0.25 in shares(other).values()
    config = MaMeConfig.from_file(file)
    with apply_mame(unet, keep=0.75) as other:
        other.set(file)
        assert other.config == config
        with other.using(str(file), fit_queries=4):
            assert other.config == config.replace(fit_queries=4)
    assert hash(config) == hash(MaMeConfig.from_dict(json.loads(json.dumps(config.to_dict()))))
    assert config != config.replace(layers=dict(reversed(rules.items()))), "their order counts"
    folder = save_tiny_pipeline(tmp_path / "tiny")
    pipe = StableDiffusionMaMePipeline.from_pretrained(folder, mame_config=file)
    pipe.save_pretrained(tmp_path / "saved")
    again = StableDiffusionMaMePipeline.from_pretrained(tmp_path / "saved")
    assert again.mame_config == pipe.mame_config == config
    with pytest.raises(TypeError, match="expected a MaMeConfig or a file of settings, got 3"):
        apply_mame(unet, 3)  # type: ignore[arg-type]


def test_layers_with_keep_draw_by_the_step_and_by_pairs_where_others_have_tau() -> None:
    unet, outputs = tiny_unet(), []
    inputs = unet_inputs(unet)
    pair = {**inputs, "sample": inputs["sample"][:1].repeat(2, 1, 1, 1)}
    for fields in ({"keep": 0.5}, {"tau": 1.0, "layers": {"*": {"keep": 0.5}}}):
        with torch.no_grad(), apply_mame(unet, min_tokens=16, **fields):
            outputs.append(unet(**pair).sample)
    assert torch.equal(*outputs)
