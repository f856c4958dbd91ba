"""A setting saved with StableDiffusionMaMePipeline is what the command line merges with, unless an
option says otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mame_sd import MaMeConfig
from mame_sd.cli import app as cli
from mame_sd.diffusion.saved_setting import read_saved_merging
from tests.builders.pipelines import mame_pipeline

FIELDS = {"min_tokens": 16, "seed": 3}


def saved(folder: Path, **settings: Any) -> Path:
    mame_pipeline(**settings, mame_config=FIELDS).save_pretrained(folder)
    return folder


def run(out: Path, *options: str) -> Any:
    """The merging that `generate` ended up with, from the manifest: a config, or None for no
    merging.
    """
    words = ["generate", "--prompt", "key", "--steps", "1", "--device", "cpu", "--out", str(out)]
    assert cli.run([*words, *options]) == 0
    mame = json.loads((out / "manifest.json").read_text())["settings"]["mame"]
    return None if mame is None else MaMeConfig.from_dict(mame)


def test_options_go_over_what_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(saved(tmp_path / "model", tau=0.3))]
    base = MaMeConfig(tau=0.3, min_tokens=16, seed=3)
    assert run(tmp_path / "a", *model) == base
    assert "note: merging as saved with the model (tau 0.3, " in capsys.readouterr().err
    assert run(tmp_path / "c", *model, "--keep", "0.5") == base.replace(keep=0.5)
    assert run(tmp_path / "d", *model, "--baseline") is None
    refused = ["--fit-queries", "8"]  # which goes with keep
    assert (
        cli.run(["generate", "--prompt", "key", *model, *refused, "--out", str(tmp_path / "e")])
        == 2
    )
    assert "the model was saved with tau 0.3" in capsys.readouterr().err.splitlines()[-1]


def test_off_stays_off_until_an_option_asks_for_merging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ["--model", str(saved(tmp_path / "model", tau=None))]
    assert run(tmp_path / "a", *model) is None
    assert run(tmp_path / "b", *model, "--tile-size", "8") == MaMeConfig(
        tile_size=8, min_tokens=16, seed=3
    )
    words = ["--steps", "1", "--device", "cpu", "--out", "merge.png"]
    assert cli.run(["compare", "key", *model, *words]) == 0  # which is about merging


def test_only_our_pipeline_has_a_saved_setting(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_saved_merging(model_folder) is None
    found = read_saved_merging(saved(tmp_path / "default", tau="default"))
    assert found is not None
    assert (found.on, found.config) == (True, MaMeConfig(min_tokens=16, seed=3))
    index = tmp_path / "default" / "model_index.json"
    index.write_text(index.read_text().replace('"tau": "default"', '"tau": 7'))
    assert cli.run(["generate", "--prompt", "key", "--model", str(tmp_path / "default")]) == 2
    assert "tau: expected a finite number from -1 to 1" in capsys.readouterr().err.splitlines()[-1]
