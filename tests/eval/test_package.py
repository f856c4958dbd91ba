"""The package in a checkout: its folder's own name gives no second copy of its modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_the_folder_is_the_package_itself() -> None:
    done = run("import eval, mame_sd.eval; print(eval is mame_sd.eval, eval.__spec__.name)")
    assert done.stdout == "True mame_sd.eval\n", done.stderr


@pytest.mark.parametrize(
    "code", ["import eval.stats", "from eval.stats import LEVEL", "from eval.scoring import runs"]
)
def test_a_module_under_the_folders_name_is_refused_in_one_sentence(code: str) -> None:
    done = run(code)
    name = code.split()[1]
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: expected the name mame_sd.{name}, got {name}; import mame_sd.{name}"
    )
