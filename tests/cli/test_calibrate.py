"""`mame-sd calibrate`: settings by block are found and written; a stopped call continues."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mame_sd.cli import app as cli
from mame_sd.cli import calibrate as command
from mame_sd.config import MaMeConfig
from mame_sd.diffusion.calibration import Calibration, Measurement, Option
from tests.builders.console import error_of
from tests.builders.tiny import save_tiny_pipeline

LAYERS = ("down_blocks.0.attentions.0", "up_blocks.1.attentions.1")
OPTIONS = [
    Option(False, 0.0, 1.0),
    Option({"keep": 0.5, "mlp_keep": 1.0, "block_keep": 1.0}, 0.1, 0.6),
    Option({"keep": 1.0, "mlp_keep": 1.0, "block_keep": 0.25}, 0.3, 0.4),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_pipeline(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    """Return what was measured; seconds are given, because layers this small gain none."""
    calibrated, measured = command.calibrated, []

    def with_seconds(handle: Any, found: Measurement, about: Any) -> Calibration:
        measured.append(found)
        options = dict.fromkeys(LAYERS, OPTIONS)
        return replace(calibrated(handle, found, about), forward=4.0, options=options)

    monkeypatch.setattr(command, "calibrated", with_seconds)
    return measured


def test_it_writes_settings_that_generate_takes_and_continues_where_it_stopped(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    measured: list[Measurement],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["--model", str(folder), "--device", "cpu", "--steps", "1", "--out", str(tmp_path)]
    given = ["calibrate", *words, "--prompts", "demo", "--num", "2", "--min-tokens", "16"]
    file, kept = tmp_path / "config.json", tmp_path / command.MEASURED
    measure = command.measure

    def one_image(handle: Any, run: Callable[[], object], found: Measurement) -> None:
        if found.images:
            raise KeyboardInterrupt
        measure(handle, run, found)

    monkeypatch.setattr(command, "measure", one_image)
    assert cli.run([*given, "--speed", "1.3"]) == 130
    first = json.loads(kept.read_text())
    assert (first["images"], file.exists()) == (1, False)
    monkeypatch.setattr(command, "measure", measure)
    capsys.readouterr()
    assert cli.run([*given, "--speed", "1.3"]) == 0
    assert "estimated 1.3" in capsys.readouterr().out
    both = json.loads(kept.read_text())
    assert both["images"] == 2
    assert both["forward"][: len(first["forward"])] == first["forward"], "not measured again"
    written = json.loads(file.read_text())
    about = written.pop("about")
    assert (about["speed"], about["model"]["name"], about["prompts"]["count"]) == (1.3, "tiny", 2)
    config = MaMeConfig.from_file(file)
    assert MaMeConfig.from_dict(written) == config
    assert set(config.layers or {}) == set(LAYERS)
    assert config.min_tokens == 16
    assert written["tile_size"] == config.tile_size, "no later version's default changes it"
    assert cli.run([*given, "--speed", "1.2"]) == 0
    assert json.loads(json.dumps(asdict(measured[0]))) == asdict(measured[1])
    assert json.loads(kept.read_text()) == both, "no new measurement"
    capsys.readouterr()
    assert cli.run([*given, "--speed", "1000"]) == 2
    assert "--speed: expected at most 1.43" in error_of(capsys)
    assert cli.run(["calibrate", *words, "--model", "embedded-unet"]) == 2
    expected = 'got config.json with model.name: "tiny" there, "embedded" here; choose another'
    assert expected in error_of(capsys)
    run = ["generate", "key", "--config", str(file)]
    assert cli.run([*run, *words[:-1], str(tmp_path / "run")]) == 0
    assert cli.run([*given[:-4], "--num", "1", "--min-tokens", "16", "--speed", "1.2"]) == 0
    assert json.loads(kept.read_text())["images"] == 1, "other prompts are measured anew"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{}"),
        (command.MEASURED, '{"my lab results": 1}'),
        (command.MEASURED, '{"about": 1, "images": 2, "x": 3}'),
        (command.MEASURED, "["),
    ],
)
def test_files_of_others_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    assert cli.run(["calibrate", "--out", str(tmp_path)]) == 2
    assert f"got {name} with values of another kind" in error_of(capsys)
    assert (tmp_path / name).read_text() == content


def test_a_model_in_which_nothing_can_merge_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(folder), "key", "--steps", "1", "--device", "cpu"]
    assert cli.run(["calibrate", *given, "--out", str(tmp_path)]) == 2
    assert "could merge, found none; lower min_tokens" in error_of(capsys)
