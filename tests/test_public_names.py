"""What `from mame_sd import ...` gives, for users and for type checkers."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import mame_sd


def test_every_public_name_is_there_and_loads_nothing_before_it_is_asked_for() -> None:
    for name in mame_sd.__all__:
        assert getattr(mame_sd, name) is not None, name
    assert mame_sd.__version__ == version("mame-sd")
    code = "import sys, mame_sd; dir(mame_sd); mame_sd.__version__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n"
