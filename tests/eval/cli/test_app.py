"""The command line of the evaluation: commands, options, exit statuses, one error line."""

from __future__ import annotations

import doctest
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from mame_sd.eval.benchmark.rows import chosen_rows
from mame_sd.eval.benchmark.suites import SUITES
from mame_sd.eval.cli import app as cli
from mame_sd.eval.cli.benchmark import command_again, note_lacking
from tests.builders.console import error_of

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder without weights."""
    monkeypatch.setenv("MAME_SD_WEIGHTS", str(tmp_path.parent / "no-weights"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# What is typed | what stands in the one line of error.
BAD = """\
paint | No such command 'paint'
benchmark --suite paper | --suite paper: expected --prompts FILE, got none
benchmark --reference nope | --reference nope: expected a folder, got no such folder; check the path
benchmark --case video | --case: expected --suite readme, got quick; leave it out
benchmark --model ./none | --model ./none: expected a folder
benchmark --weights-dir none | --weights-dir none: expected a folder, got no such folder; check
classify --rows mame-0.8 | --data: expected a folder of class folders
cache --texts none | --texts none: expected a folder, got no such folder
cache --shares 1.5 | --shares: expected shares above 0 and below 1, got 1.5
caption --data none --references none --tokens 0 | --tokens: expected at least 1, got 0
weights --weights-dir none | --weights-dir none: expected a folder
weights magic | weights: expected names of lpips-alex
"""


@pytest.mark.parametrize("case", BAD.splitlines())
def test_bad_input_is_one_line_and_status_2(
    here: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    line, _, message = case.partition(" | ")
    assert cli.run(line.split()) == 2
    assert message in error_of(capsys, silent=True)
    assert list(here.iterdir()) == []


def test_rows_that_lack_a_package_are_named_before_anything_is_made(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mame_sd.eval.rivals.tomesd.has_tomesd", lambda: False)
    note_lacking(chosen_rows("tomesd-25,tomesd-50,mame-default"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: left out: tomesd-25, tomesd-50 (tomesd is not installed: pip")
    assert "'mame-sd[rivals]'" in line


def test_the_command_of_a_report_is_that_of_the_shell_without_out() -> None:
    given = ["benchmark", "--out=x", "--prompts", "a b", "--out", "y", "--num", "2"]
    assert command_again(given) == "mame-sd-eval benchmark --prompts 'a b' --num 2"


def test_weights_are_listed_with_what_is_missing_or_wrong(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "lpips-alex.safetensors").write_bytes(b"other bytes")
    assert cli.run(["weights", "lpips-alex", "inception-fid", "--weights-dir", str(here)]) == 0
    lpips, _, origin, inception, *_ = capsys.readouterr().out.splitlines()
    assert lpips.startswith("wrong hash  lpips-alex")
    assert inception.startswith("missing     inception-fid")
    assert "sha256 0aa426dd" in origin


def test_the_suites_are_documented_as_they_are() -> None:
    for name, suite in SUITES.items():
        row = next(line for line in DOCUMENT.splitlines() if line.startswith(f"| `{name}`"))
        cells = [cell.strip() for cell in row.split("|")]
        assert cells[3].startswith(f"{suite.num:,}")
        assert cells[4:6] == [str(suite.steps), str(suite.rounds)]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


WITHOUT_TORCH = """\
benchmark --suite x
benchmark --rows random-2
benchmark --row keep=0
benchmark --model ./none
benchmark --suite paper
benchmark --suite readme --steps 3
benchmark --prompts none.txt
benchmark --out /dev/null
score none none
score none none --device abacus
score none none --metrics x
classify --data . --rows bad
caption --data none --references none
cache --texts none
weights --weights-dir none
"""


def test_help_and_errors_of_what_is_given_import_no_torch() -> None:
    code = (
        "import sys; from mame_sd.eval.cli import app; [app.run(line.split()) for line in {}];"
        " print('torch' in sys.modules)"
    )
    lines = WITHOUT_TORCH.splitlines()
    done = python(code.format(lines))
    assert done.stdout == "False\n"
    assert done.stderr.count("error: ") == len(lines)


def test_the_folders_own_name_is_refused_so_that_no_module_is_loaded_twice() -> None:
    assert python("from eval.scoring import runs").stderr.splitlines()[-1] == (
        "ImportError: expected the name mame_sd.eval, got eval; import mame_sd.eval"
    )


def test_examples_in_docstrings_hold() -> None:
    """Those of mame_sd are found by pytest, but the folder eval has another name."""
    files = [path.relative_to(ROOT) for path in (ROOT / "eval").rglob("*.py")]
    names = [f"mame_sd.{'.'.join(file.with_suffix('').parts)}" for file in files
             if ">>> " in (ROOT / file).read_text(encoding="utf-8")]  # fmt: skip
    assert names
    for name in names:
        assert doctest.testmod(import_module(name)).failed == 0, name
