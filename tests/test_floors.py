"""What pyproject.toml calls supported is what `make test-oldest` installs."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def test_floors_are_the_oldest_tested_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [
        Requirement(text)
        for text in (*project["dependencies"], *project["optional-dependencies"]["lora"])
    ]
    floors = {one.name: Version(next(iter(one.specifier)).version) for one in required}
    lines = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8").splitlines()
    for oldest in (Requirement(line) for line in lines if not line.startswith("#")):
        pinned = Version(next(iter(oldest.specifier)).version)
        assert floors[oldest.name].release == pinned.release[: len(floors[oldest.name].release)], (
            oldest.name
        )
