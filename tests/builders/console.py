"""What a command said on the console."""

from __future__ import annotations

import pytest


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one error line that stderr ends with."""
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert not any("Traceback" in line for line in lines)
    return lines[-1]
