"""The package in a checkout: its folder's own name is refused, so no module is loaded twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_the_folders_own_name_is_refused_in_one_sentence() -> None:
    assert run("from eval.scoring import runs").stderr.splitlines()[-1] == (
        "ImportError: expected the name mame_sd.eval, got eval; import mame_sd.eval"
    )
