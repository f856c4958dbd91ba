"""Settings: defaults, refusals and their words, and the ways in and out."""

from __future__ import annotations

import copy
import json
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mame_sd import MaMeAttnProcessor, apply_mame
from mame_sd.config import DEFAULT_KEEP, MaMeConfig
from tests.builders.tiny import tiny_unet


def test_nothing_given_is_the_measured_default() -> None:
    config = MaMeConfig()
    assert (config.keep, config.tau, config.method) == (DEFAULT_KEEP, None, "keys")
    assert config.is_default
    assert config.given == {}
    assert not MaMeConfig(keep=DEFAULT_KEEP).is_default
    left_out: dict[str, Any] = {"tile_size": None, "redraw": None}
    assert MaMeConfig(**left_out) == config


def test_the_number_tells_the_method() -> None:
    assert MaMeConfig(tau=0.8).method == "tokens"
    assert MaMeConfig(keep=0.5).method == "keys"
    assert MaMeConfig(tau=0.8).replace(keep=0.5) == MaMeConfig(keep=0.5)
    assert MaMeConfig(keep=0.5, tile_size=8).replace(tau=0.8) == MaMeConfig(tau=0.8)
    assert MaMeConfig(keep=0.5, seed=3).replace(keep=None) == MaMeConfig(seed=3)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tau": 0.8, "keep": 0.5}, r"tau or keep, got both \(tau=0.8, keep=0.5\); drop one"),
    ({"layers": dict.fromkeys(map(str, range(1001)), False)}, "at most 1,000 patterns, got 1,001"),
    ({"tau": 1.5}, "tau: expected a number from -1 to 1, got 1.5"),
    ({"tau": float("nan")}, "tau: expected a number from -1 to 1, got nan"),
    ({"tau": 1j}, "tau: expected a number"),
    ({"keep": True}, "keep: expected a share above 0 and at most 1, got True"),
    ({"keep": 0}, "keep: .*above 0 and at most 1, got 0"),
    ({"min_tokens": np.float64(2)}, "min_tokens: expected a whole number"),
    ({"min_tokens": 2**63}, "min_tokens: expected a whole number"),
    ({"fit_queries": -1}, "fit_queries: expected a whole number from 0"),
    ({"tile_size": 2**63}, r"tile_size: expected 0 for no tiles, or a side of 2 to 2\^31 - 1"),
    ({"redraw": 1}, "redraw: expected True or False, got 1"),
    ({"size": (0, 4)}, "size: expected two whole numbers"),
    ({"size": {8, 4}}, "size: expected two whole numbers"),
    ({"calibrated_for": 3}, "calibrated_for: expected what calibration wrote"),
    ({"tile_size": 8, "tau": 0.5}, "tile_size: goes with keep, .*; leave it out, or give keep"),
    ({"layers": {"a": {"keep": 2}}}, "layers: a: keep: expected a share"),
    ({"layers": {"a": {"redraw": False}}}, "layers: a: redraw applies to the model"),
    ({"layers": {"a": {"kep": 0.5}}}, "layers: a: unknown setting 'kep'; did you mean 'keep'"),
    ({"layers": [["a", {"keep": 0.5}]]}, "layers: expected settings by pattern"),
    ({"layers": {"a": 0.5}}, "layers: a: expected settings such as .* got 0.5"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=str)
def test_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaMeConfig(**given)


def test_an_unknown_name_is_told_with_the_nearest_one() -> None:
    for enter in (
        lambda: MaMeConfig.from_dict({"taus": 0.8}),
        lambda: apply_mame(tiny_unet(), taus=0.8),
        lambda: MaMeAttnProcessor(taus=0.8),
    ):
        with pytest.raises(ValueError, match="unknown setting 'taus'; did you mean 'tau'"):
            enter()


def test_numbers_of_other_kinds_are_kept_as_pythons_own() -> None:
    config = MaMeConfig(keep=Fraction(1, 4), min_tokens=np.int64(9), size=[np.int32(2), 3])
    assert json.dumps(config.to_dict())
    assert (type(config.keep), type(config.min_tokens), config.size) == (float, int, (2, 3))


def test_copied_pickled_and_hashed() -> None:
    config = MaMeConfig(keep=0.5, layers={"a.*": {"keep": 0.25}, "b": False})
    for same in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same == config
        assert hash(same) == hash(config)
        assert same.given == config.given


def test_settings_of_layers() -> None:
    config = MaMeConfig(
        keep=0.5, layers={"a": {"keep": 0.25, "fit_queries": 0}, "d": {"tau": 0.8}, "b": False}
    )
    assert config.of_layer("a.0") == MaMeConfig(keep=0.25, fit_queries=0)
    assert config.of_layer("d.1") == MaMeConfig(tau=0.8)
    assert config.of_layer("b.x") is None
    assert config.of_layer("c") == MaMeConfig(keep=0.5)
    several = MaMeConfig(layers={"a.*": {"tile_size": 8}, "a.[24]": {"keep": 0.5}, "a.5": False})
    # Rules of layers leave MLPs to themselves: the default restores none beside them.
    assert several.of_layer("a.2.x") == MaMeConfig(keep=0.5, tile_size=8)
    for rule in ({"keep": None}, {"mlp_keep": None}, {"tile_size": 8}):
        for base in ({}, {"keep": 0.5}, {"mlp_keep": 0.5}):
            found = MaMeConfig(**base, layers={"a": rule}).of_layer("a")
            assert found.mlp_share == (base.get("mlp_keep", 1) if "mlp_keep" not in rule else 1)
    assert several.of_layer("a.5") is None
    clash = MaMeConfig(layers={"a": {"tau": 0.6}, "a.b": {"tile_size": 8}})
    with pytest.raises(ValueError, match=r"layers: a\.b\.c: tile_size: goes with keep"):
        clash.of_layer("a.b.c")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"keep": 0.1, "min_tokens": 9, "fit_queries": 0, "tile_size": 2, "references": 0.5},
        {"redraw": False, "share_guidance_plan": False, "seed": 2**40, "size": (1, 99)},
        {"tau": -0.5, "calibrated_for": "é"},
        {"layers": {"a.*": {"keep": 0.25}, "b": False, "c": {"tau": 0.8}}},
    ],
    ids=str,
)
def test_goes_through_dicts_and_files(tmp_path: Path, given: dict[str, Any]) -> None:
    config = MaMeConfig(**given)
    for only in (False, True):
        assert MaMeConfig.from_dict(json.loads(json.dumps(config.to_dict(only)))) == config
    assert config.to_dict(given_only=True).keys() == given.keys()
    file = tmp_path / "mame.json"
    file.write_text(json.dumps({**config.to_dict(given_only=True), "about": {"speed": 1.2}}))
    assert MaMeConfig.from_file(file) == config
    assert MaMeConfig(**{**config.given}) == config


def test_reads_the_old_name_of_a_field(tmp_path: Path) -> None:
    file = tmp_path / "mame.json"
    file.write_text(json.dumps({"keep": 0.5, "made_for": "Model with 6 self-attentions"}))
    assert MaMeConfig.from_file(file).calibrated_for == "Model with 6 self-attentions"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "tau: 1", "expected a .json file of settings .*, got .yaml"),
        ("a.json", "{", "expected a .json file of settings .*, but"),
        ("a.json", "[1]", "expected an object of settings"),
        ("a.json", '{"tau": 0.5, "tau": 0.6}', "the name 'tau' stands in one object twice"),
        ("a.json", '{"tau": 7}', "tau: expected a number"),
        ("a.json", "[" * 200_000, "expected a .json file of settings .*, but"),
    ],
)
def test_a_bad_file_is_told_by_its_name(tmp_path: Path, name: str, text: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        MaMeConfig.from_file(file)
    assert str(error.value).startswith(str(file))
