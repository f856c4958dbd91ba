"""The table of diffusers' own tests: what an earlier run counted stays, until the same is counted
anew or versions change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.robustness.diffusers_suite import __main__ as suite

VERSIONS = {"tests": "0.40.0", "diffusers": "0.42.1"}


def counted(passed: int) -> dict[str, int]:
    return {"ground": 9, "passed": passed, "merged": 1}


def row(name: str, differences: list[dict[str, str]], **counts: dict[str, int]) -> dict[str, Any]:
    return {"suite": name, "counts": counts, "differences": differences}


def failed(mode: str, test: str) -> dict[str, str]:
    return {"mode": mode, "test": test}


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "earlier.json"
    monkeypatch.setattr(suite, "RESULT", path)
    rows = [
        row(
            "SD", [failed("on", "old"), failed("scaled", "kept")], on=counted(8), scaled=counted(7)
        ),
        row("Flux", [], off=counted(9)),
    ]
    path.write_text(json.dumps({"versions": VERSIONS, "suites": rows}), encoding="utf-8")
    return path


def test_what_is_counted_anew_takes_the_place_of_what_was(earlier: Path) -> None:
    now = [row("SD", [failed("on", "new")], on=counted(6)), row("Flux", []), row("Wan", [])]
    sd, flux = suite.with_earlier(now, VERSIONS)
    assert sd["counts"] == {"on": counted(6), "scaled": counted(7)}
    assert sd["differences"] == [failed("scaled", "kept"), failed("on", "new")]
    assert (flux["suite"], flux["counts"]) == ("Flux", {"off": counted(9)})


@pytest.mark.parametrize("gone", [True, False], ids=["no file", "other versions"])
def test_nothing_stays_of_other_versions(earlier: Path, gone: bool) -> None:
    if gone:
        earlier.unlink()
    versions = VERSIONS if gone else {**VERSIONS, "diffusers": "0.43.0"}
    (sd,) = suite.with_earlier([row("SD", [], off=counted(9)), row("Flux", [])], versions)
    assert sd["counts"] == {"off": counted(9)}
    assert sd["differences"] == []
