"""The command line: options, exit statuses, and one error line for whatever goes wrong."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from mame_sd.cli import app as cli
from mame_sd.cli import console
from mame_sd.cli.console import Bar, progress
from mame_sd.cli.groups import PromptOptions
from mame_sd.config import MaMeConfig
from mame_sd.eval.cli import app as evaluation
from tests.builders.console import error_of
from tests.builders.tiny import save_tiny_pipeline

LONG = "x" * 300


@pytest.fixture
def run_cli(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run in an empty folder, without lines of progress; `quick` adds a tiny model and settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "FIRST_LINE", 1e6)

    def run(*arguments: str, quick: bool = False) -> int:
        extra = f"--model {model_folder} --device cpu --steps 1 --min-tokens 16".split()
        return cli.run([*arguments, *(extra if quick else [])])

    return run


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings of a run from its manifest."""
    settings: dict[str, Any] = json.loads((folder / "manifest.json").read_text())["settings"]
    return settings


# What is typed | what stands in the one line of error; `x` is a prompt, LONG a very long name.
# Only rows with a mark at the end need torch.
BAD = """\
paint | No such command 'paint'
generate --stepz 3 | No such option: --stepz
generate --steps | --steps
generate --steps many | --steps: expected a whole number, got 'many'; mame-sd generate --help
generate | expected prompts, got none; give "a prompt" in quotes, or --prompts FILE
generate ' ' | expected a prompt, got an empty one
generate --prompts | Option '--prompts' requires an argument; mame-sd generate --help shows
generate --prompts . | .: expected a prompt file ending in .txt, .csv, .tsv
generate x --steps 0 | --steps: expected at least 1, got 0
generate x --height 100 | multiple of 8 pixels from 8 to 65536, got 100; try 96
generate x --seed -1 | --seed: expected a whole number from 0
generate x --keep 25% | --keep: expected a number, got '25%'
generate x --guidance nan | --guidance: expected a finite number, got nan
generate x --tau 0.8 --keep 0.5 | expected tau or keep, got both
generate x --config kep=0.5 | unknown setting 'kep'; did you mean 'keep'?
generate x --config tile_size | --config tile_size: expected a .json file of settings
generate x --config . | {"keep": 0.5}, got no ending; rename or convert it
generate x --baseline --config seed=1 | expected no merging options next to it, got --config
generate x --config a.yaml | a.yaml: expected a .json file of settings such as
generate x --model a/b --lora '' | --lora : expected a .safetensors file, a folder or a hub id
generate x --model a/b --lora nobody/nothing:inf | expected a finite scale after the colon
generate x --model '' | --model: expected a folder, file or hub id, got nothing; give one
generate x --dtype int8 | --dtype: expected auto, float32
generate x --device cuda:7 | --device cuda:7: expected auto or a device of this machine (cpu | *
generate x --width 64 | --height, --width: expected both or neither, got None and 64; give both
generate --prompts none.txt | none.txt: the prompt file can't be read (No such file or directory)
generate x --model ./none | --model ./none: expected a folder
generate x --model nobody/nothing | --model nobody/nothing: expected a folder, or a model | *
generate x --single-file-config x | expected a .safetensors file as --model, got none; leave it out
generate x --revision main | --revision: expected a hub id as --model, got none; leave it out
compare '' --model ./none | expected a prompt, got an empty one
compare x --out a.jpg | --out a.jpg: expected a file ending in .png, got .jpg; name a file
compare x --out . | --out .: expected a file ending in .png, got a folder
calibrate --out /dev/null | --out /dev/null: expected a folder, got the file
generate x --model . | got one without model_index.json
generate x --model embedded-unicorn | unicorn: expected the name of an embedded model
generate x --model embedded-transformer --lora ./none | --lora ./none: expected a .safetensors
generate x --out /dev/null | --out /dev/null: expected a folder, got the file
calibrate --speed 1 --model ./none | --speed: expected a number above 1, got 1; try 1.2
calibrate --speed nan --model ./none | --speed: expected a number above 1, got nan
calibrate --tau 0.8 | No such option: --tau
calibrate --config tau=0.8 | merging: expected no tau, for calibration tries shares to keep
ui --port 99999 | --port: expected a number from 0 to 65535, got 99999
ui --model ./none | --model ./none: expected a folder
generate x --out LONG | can't be written (File name too long)
generate x --model LONG | found nothing there; check the path
""".replace("LONG", LONG)


@pytest.mark.parametrize("case", BAD.splitlines())
def test_bad_input_is_one_line_and_status_2(
    run_cli: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, case: str
) -> None:
    typed, message = case.split(" | ")[:2]
    assert run_cli(*shlex.split(typed)) == 2
    assert message in error_of(capsys)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_settings_names_where_they_stand(
    run_cli: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["x", "--config", "a.json", "--out", "run"]
    for settings, message in {
        '{"kep": 0.5}': "--config a.json: unknown setting 'kep'",
        '{"layers": {"none": {"keep": 0.5}}}': "merging: layers: ",
        '{"calibrated_for": "another"}': "merging: calibrated_for: ",
        '{"references": 0.5}': "merging: references: ",
    }.items():
        (tmp_path / "a.json").write_text(settings)
        assert run_cli("generate", *given, quick=True) == 2
        assert error_of(capsys).startswith(f"error: {message}")
    (save_tiny_pipeline(tmp_path / "tiny") / "mame.json").write_text('{"kep": 0.5}')
    assert run_cli("generate", "x", "--model", "tiny") == 2
    assert "mame.json: unknown setting 'kep'" in error_of(capsys)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_folder_whose_name_the_terminal_lacks(
    run_cli: Any, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding, errors="strict", write_through=True)
    monkeypatch.setattr(sys, "stdout", stdout)
    out = os.fsdecode(b"o\xff") if encoding == "utf-8" else "ö"
    assert run_cli("generate", "x", "--out", out, quick=True) == 0
    assert re.match(rb"1 image in o?\\(udcff|xf6), ", stdout.buffer.getvalue())  # type: ignore[attr-defined]


def test_broken_models_are_one_line(
    run_cli: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model.ckpt").write_bytes(b"x")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model_index.json").write_text('{"_class_name": "MagicPipeline"}')
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "model_index.json").write_text("{")
    weights = save_tiny_pipeline(tmp_path / "tiny") / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for model, message in {
        "model.ckpt": "expected a folder, a hub id or a .safetensors file, got another file",
        "foreign": "expected a pipeline class of diffusers, got 'MagicPipeline'",
        "cut": "expected a text-to-image pipeline that diffusers can load",
        "tiny": "expected a text-to-image pipeline that diffusers can load",
    }.items():
        assert run_cli("generate", "x", "--model", model) == 2
        assert message in error_of(capsys)
    assert not (tmp_path / "out").exists()


def test_generate_says_what_it_did(
    run_cli: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_cli("generate", "a [red] key", "--out", "run", quick=True) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith("1 image in run, ")
    assert f"level 0: {256 * (MaMeConfig().keep or 0):.0f} of 256 keys kept" in out
    assert err == ""
    assert settings_of(tmp_path / "run")["mame"]["keep"] == MaMeConfig().keep
    assert run_cli("generate", "a", "--out", "b", "--json", "-q", quick=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["out"], found["images"], found["levels"][0]["tokens_in"]) == ("b", 1, 256)
    assert run_cli("generate", "a [red] key", "--out", "run", quick=True) == 0
    assert capsys.readouterr().out.startswith("nothing to do: 1 image in run already, ")


@pytest.mark.filterwarnings("ignore:no layer merges")
def test_generate_says_that_the_default_merged_nothing(
    run_cli: Any, capsys: pytest.CaptureFixture[str], model_folder: Path
) -> None:
    words = f"key --out run --device cpu --steps 1 --model {model_folder}".split()
    assert run_cli("generate", *words) == 0
    out = capsys.readouterr().out
    assert "level 0" not in out
    assert out.splitlines()[1].startswith("no layer merged, which is the fastest way here")
    assert "--min-tokens 256 merges" in out


def test_other_settings_are_one_short_line_before_the_model_where_they_can_be(
    run_cli: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["generate", "key", "--out", "run", "--device", "cpu"]
    assert run_cli(*given, quick=True) == 0
    capsys.readouterr()
    (tmp_path / "empty" / "tiny").mkdir(parents=True)  # the same name, and nothing to load
    given += ["--steps", "1", "--model"]
    for others, message in (
        ("empty/tiny --baseline", "mame: settings there, null here"),
        ("empty/tiny --tau 0.9", "mame.tau: null there, 0.9 here"),
        ("empty/tiny --dtype float16", 'model.dtype: "float32" there, "float16" here'),
        ("empty/tiny --lora a/b", 'model.loras: [] there, [{"name": "a/b", "sha256": ... here'),
        ("empty/tiny --scheduler X", 'model.scheduler: "DDIMScheduler" there, "X" here'),
        ("nobody/nothing", 'model.name: "tiny" there, "nobody/nothing" here'),
    ):
        assert run_cli(*given, *others.split()) == 2
        assert f"begun with other settings ({message}); choose another" in error_of(capsys)
    assert run_cli(*given, "empty/tiny", "--min-tokens", "16") == 2
    assert "got one without model_index.json" in error_of(capsys), "nothing else differs"
    other = "--seed 4 --guidance 9 --batch-size 2 --images-per-prompt 7 --width 64 --height 64"
    assert run_cli(*given, "nobody/nothing", "--negative-prompt", LONG, *other.split()) == 2
    line = error_of(capsys)
    assert len(line) <= 300
    assert "batch_size: 1 there, 2 here; " in line


def test_a_prompt_without_quotes_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(PromptOptions(texts=("a", "cat")).read()) == 2
    assert "2 prompts of one word each; a prompt of several needs quotes" in capsys.readouterr().err
    PromptOptions(texts=("a cat", "dog")).read()
    PromptOptions(texts=("cat",)).read()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("quiet", [True, False])
def test_words_that_the_model_does_not_read_are_noted(
    run_cli: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    quiet: bool,
) -> None:
    monkeypatch.setattr(logging.getLogger("diffusers"), "handlers", [caplog.handler])
    long = " ".join(["red key"] * 60)
    assert run_cli("generate", "key", long, "--out", "a", *["-q"] * quiet, quick=True) == 0
    said = ["The following part of your input was truncated" in text for text in caplog.messages]
    assert said == ([] if quiet else [True])


def test_a_terminal_shows_loading_and_steps(
    run_cli: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal then
    told: list[tuple[int, int]] = []
    step = Bar.step
    monkeypatch.setattr(Bar, "step", lambda *given: (told.append(given[1:]), step(*given)))
    assert run_cli("generate", "key", "--out", "a", quick=True) == 0
    assert told == [(1, 1)]
    assert "loading " in capsys.readouterr().err


def test_settings_and_prompts_of_files_go_with_those_of_the_command_line(
    run_cli: Any, tmp_path: Path
) -> None:
    tau = "--tau 0.1 --config seed=3,min_tokens=32"
    keep = "--keep 0.5 --config fit_queries=8,tile_size=0,redraw=false,share_guidance_plan=False"
    own: dict[str, Any] = {"fit_queries": 8, "tile_size": 0, "redraw": False}
    (tmp_path / "mame.json").write_text('{"keep": 0.6, "fit_queries": 8, "seed": 3}')
    (tmp_path / "a.txt").write_text("key\n")
    for out, options, config in (
        ("a", tau, MaMeConfig(tau=0.1, min_tokens=16, seed=3)),
        ("b", keep, MaMeConfig(keep=0.5, min_tokens=16, share_guidance_plan=False, **own)),
        ("c", "--config mame.json --tau 0.5", MaMeConfig(tau=0.5, min_tokens=16, seed=3)),
    ):
        given = ["generate", "--prompts", "a.txt", "\x07key", "--out", out, *options.split()]
        assert run_cli(*given, quick=True) == 0
        assert MaMeConfig.from_dict(settings_of(tmp_path / out)["mame"]) == config
        rows = map(json.loads, (tmp_path / out / "samples.jsonl").read_text().splitlines())
        assert [row["prompt"] for row in rows] == ["key", "\x07key"]


def test_help_is_there_on_a_terminal_of_no_width(
    run_cli: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert cli.run(["generate", "--help"]) == 0
    assert "--images-per-prompt" in capsys.readouterr().out


PROGRAMS = {"mame-sd": (cli.run, "doctor"), "mame-sd-eval": (evaluation.run, "weights")}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_bare_command_shows_help_and_both_programs_tell_their_version(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, command = PROGRAMS[name]
    assert run([]) == 2
    out, err = capsys.readouterr()
    assert f"Usage: {name}" in out
    assert command in out
    assert err == ""
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"{name} {version('mame-sd')}\n"
    assert run([command, "-h"]) == 0
    assert f"Usage: {name}" in capsys.readouterr().out


def test_a_shell_completes_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"_MAME_SD_COMPLETE": "complete_bash", "COMP_WORDS": "mame-sd ge", "COMP_CWORD": "1"}
    program = "from mame_sd.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **asked}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["generate"]


def test_away_from_a_terminal_progress_is_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "FIRST_LINE", 0.0)
    with progress("images") as tell:
        tell(2, 6)
        tell(3, 6)
        tell.step(1, 4)
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == "images: 2 of 6"
    assert re.fullmatch(r"images: 3 of 6, about \d:\d\d:\d\d left", second)
    assert re.fullmatch(r"images: 3 of 6, step 1 of 4, about \d:\d\d:\d\d left", third)
    token = console.OUTPUT.set(console.Output(quiet=True))
    with progress("images") as tell:
        tell(1, 2)
        console.note("nothing")
    console.OUTPUT.reset(token)
    assert capsys.readouterr().err == ""


def test_help_and_errors_of_what_is_given_wait_for_no_library(tmp_path: Path) -> None:
    settings = {"settings": {"steps": 3}, "format": "mame-sd run 1"}
    (tmp_path / "begun" / "images").mkdir(parents=True)
    (tmp_path / "begun" / "manifest.json").write_text(json.dumps(settings))
    (tmp_path / "begun" / "images" / "p00001_0.png").touch()
    quick = [case.split(" | ")[0] for case in BAD.splitlines() if not case.endswith("*")]
    lines = [shlex.split(line) for line in (*quick, "generate x --out begun", "generate --help")]
    code = "import sys; from mame_sd.cli import app; [app.run(line) for line in {}];"
    code = code.format(lines) + "sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0
    assert done.stderr.count("error: ") == len(lines) - 1


def test_settings_next_to_the_weights_are_taken(run_cli: Any, tmp_path: Path) -> None:
    folder = save_tiny_pipeline(tmp_path / "tiny")
    saved = {"min_tokens": 16, "layers": {"down_blocks": {"keep": 0.5}, "up_blocks": False}}
    (folder / "mame.json").write_text(json.dumps(saved))
    given = ["--model", "tiny", "--device", "cpu", "--steps", "1"]
    assert run_cli("generate", "key", *given, "--out", "run") == 0
    assert settings_of(tmp_path / "run")["mame"]["layers"] == saved["layers"]
