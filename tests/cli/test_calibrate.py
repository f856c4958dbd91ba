"""`mame-sd calibrate` measures a pipeline's layers and writes settings that generate takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mame_sd.cli import app as cli
from mame_sd.config import MaMeConfig
from mame_sd.diffusion import calibration
from tests.builders.tiny import save_tiny_pipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_pipeline(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def quick_merging(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model so small gains no time: merging is told to take half of what it took."""
    measure_image = calibration.measure_image

    def faster(*args: object) -> calibration.Measurement:
        found = measure_image(*args)  # type: ignore[arg-type]
        for layer in found.layers.values():
            for number, seconds in layer.seconds.items():
                layer.seconds[number] = [s / 2 for s in layer.unmerged[: len(seconds)]]
        return found

    monkeypatch.setattr("mame_sd.runs.calibrate.measure_image", faster)


@pytest.mark.usefixtures("quick_merging")
def test_the_command_writes_settings_that_generate_takes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "settings.json"
    command = ["calibrate", "--model", str(folder), "--prompt", "a red key", "--steps", "1"]
    command += ["--min-tokens", "16", "--size", "32", "--out", str(file)]
    assert cli.run([*command, "--speed", "1.01"]) == 0
    out = capsys.readouterr().out
    assert "times as fast as unmerged" in out
    assert str(file) in out
    about = json.loads(file.read_text())["about"]
    assert about["found_by"] == "mame-sd calibrate"
    assert (about["steps"], about["size"], about["prompts"]) == (1, [32, 32], 1)
    config = MaMeConfig.from_file(file)
    assert config.min_tokens == 16
    assert any(rule is not False for rule in dict(config.layers or {}).values())
    generate = ["generate", "--model", str(folder), "--prompt", "key", "--steps", "1"]
    assert cli.run([*generate, "--config", str(file), "--out", str(tmp_path / "run")]) == 0
    assert cli.run([*command, "--speed", "1000"]) == 2
    assert "error: --speed: expected at most" in capsys.readouterr().err.splitlines()[-1]
    assert cli.run([*command[:-6], "--speed", "1.1", "--out", str(file)]) == 2
    assert "lower min_tokens" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Missing option '--speed'"),
        (["--speed", "1"], "--speed: expected a number above 1, got 1.0"),
        (["--speed", "nan"], "--speed: expected a number above 1, got nan"),
        (["--speed", "1.2", "--metric", "dot"], "No such option: --metric"),
        (["--speed", "1.2", "--num", "0"], "--num: expected at least 1, got 0"),
    ],
    ids=str,
)
def test_a_bad_wish_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    given = ["calibrate", "--model", str(tmp_path / "none"), *options, "--out", str(tmp_path / "a")]
    assert cli.run(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
