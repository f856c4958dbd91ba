"""What a command said on the console."""

from __future__ import annotations

import pytest


def error_of(capsys: pytest.CaptureFixture[str], silent: bool = False) -> str:
    """Return the one error line that ends stderr. If `silent`, stdout must be empty."""
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert not (silent and out)
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert not any("Traceback" in line for line in lines)
    return lines[-1]
