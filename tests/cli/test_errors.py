"""The edge of the command line: exit statuses, one error line, Ctrl-C, broken libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mame_sd.cli.console import note
from mame_sd.cli.errors import MACHINE, describe, exit_status
from mame_sd.errors import UserError
from tests.builders.console import error_of

ROOT = Path(__file__).parents[2]
# Runs `mame-sd` after something was made to happen at the import of a module.
AT_IMPORT = """
import signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            {action}

sys.meta_path.insert(0, Finder())
sys.path.insert(0, {root!r})
sys.argv = ["mame-sd", "generate", "key", "--out", "run"]
from mame_sd.__main__ import main
main()
"""


def test_the_machine_has_its_own_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(lambda: torch.empty(2**52)) == 1
    assert "not enough memory" in error_of(capsys)
    assert exit_status(lambda: Path("/nowhere/file").read_bytes()) == 1
    assert "No such file or directory" in error_of(capsys)
    assert exit_status(lambda: {}["bug"]) == 1
    assert "unexpected KeyError: 'bug'; this is a bug" in error_of(capsys)
    assert exit_status(lambda: None) == 0
    status, message = describe(ModuleNotFoundError("No module named 'scipy'", name="scipy"))
    assert status == MACHINE
    assert message == "expected the package scipy, found none; pip install 'mame-sd[eval]'"


def test_an_interrupt_has_its_own_status(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    def swallow() -> None:
        try:
            interrupt()
        except KeyboardInterrupt:
            raise RuntimeError from None

    for interrupted in (interrupt, swallow):
        assert exit_status(interrupted) == 130
        assert capsys.readouterr().err.startswith("interrupted")


def test_a_long_error_or_note_is_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    """Either may hold what a file or a run folder's manifest holds."""

    def fail() -> None:
        raise UserError(f"expected a\x1b[2J,\n got {'b' * 10_000_000}; do c")

    assert exit_status(fail) == 2
    line = error_of(capsys)
    note(f"expected a\x1b[2J,\n got {'b' * 10_000_000}; do c")
    (noted,) = capsys.readouterr().err.splitlines()
    for found, kind in ((line, "error"), (noted, "note")):
        assert len(found) < 2100
        assert found.startswith(rf"{kind}: expected a\x1b[2J,  got bbb")
        assert found.endswith("bbb; do c")


def at_import(module: str, action: str, folder: Path) -> subprocess.CompletedProcess[str]:
    code = AT_IMPORT.format(module=module, action=action, root=str(ROOT))
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)


def test_an_interrupt_or_a_broken_library_while_they_load_is_one_line(tmp_path: Path) -> None:
    done = at_import("torch", "signal.raise_signal(signal.SIGINT)", tmp_path)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "interrupted; finished images are kept, and the same command continues\n"
    done = at_import("torch", "raise ImportError(f'No module named {name}')", tmp_path)
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: a package that mame-sd needs does not load (No module named tor")
