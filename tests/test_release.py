"""A release says the same version everywhere, and what is not set yet stops it."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from scripts.release import OWNERS, VERSIONS, problems, set_owner, set_version

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the files that a release reads, ready for one."""
    for name in {name for name, _ in (*VERSIONS, *OWNERS)} | {"CHANGELOG.md"}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    set_version("1.2.3", tmp_path)
    set_owner("somebody", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3\n", encoding="utf-8")
    return tmp_path


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_the_version_is_one() -> None:
    assert not [line for line in problems() if "expected version" in line]


def test_a_checkout_with_all_set_may_be_released(checkout: Path) -> None:
    place = "https://github.com/somebody/mame-sd"
    assert [*problems(checkout, "v1.2.3", place)] == []


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("pyproject.toml", "/somebody/", "/OWNER/", "pyproject.toml: expected the owner of the"),
        ("pyproject.toml", "/somebody/", "/another/", "expected Repository https://github.com/s"),
        ("pyproject.toml", '"somebody"', '"OWNER"', "pyproject.toml: expected the owner of the"),
        ("comfyui/README.md", "/somebody/", "/OWNER/", "comfyui/README.md: expected the owner of"),
        ("pyproject.toml", "models==1.2.3", "models==1.2.2", "expected version 1.2.3, got 1.2.2"),
        ("mame_sd/embedded/pyproject.toml", "1.2.3", "1.2.4", "expected version 1.2.3, got 1.2.4"),
        ("CITATION.cff", "version: 1.2.3", "version: 1.0.0", "expected version 1.2.3, got 1.0.0"),
        ("CHANGELOG.md", "## 1.2.3", "## 1.2.3 (unreleased)", "expected the heading '## 1.2.3'"),
    ],
)
def test_what_is_missing_stops_it(
    checkout: Path, name: str, old: str, new: str, message: str
) -> None:
    change(checkout / name, old, new)
    place = "https://github.com/somebody/mame-sd"
    (problem,) = problems(checkout, "v1.2.3", place)
    assert message in problem


def test_the_placeholder_of_the_owner_is_no_owner(checkout: Path) -> None:
    for owner in ("OWNER", "", "a/b", "-a"):
        with pytest.raises(ValueError, match="expected the name of an account"):
            set_owner(owner, checkout)


def test_another_tag_or_form_of_version_is_refused(checkout: Path) -> None:
    (problem,) = problems(checkout, "v1.2.4")
    assert problem.startswith("expected the tag v1.2.3, got v1.2.4")
    for version in ("1.2", "v1.2.3", "1.2.3rc1"):
        with pytest.raises(ValueError, match=r"expected a version like 0\.3\.0, got "):
            set_version(version, checkout)


def test_workflows_run_what_is_there() -> None:
    """Their files, modules, extras and calls of one another."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert {path.stem for path in WORKFLOWS} >= {"test", "newest", "wheels", "release", "site"}
    for path in WORKFLOWS:
        text = path.read_text(encoding="utf-8")
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}, path.name
        for module in re.findall(r"python -m (scripts[.\w]+)", text):
            assert (ROOT / (module.replace(".", "/") + ".py")).exists(), path.name
        for names in re.findall(r'"\.\[(.*?)\]"', text):
            assert set(names.split(",")) <= set(extras), path.name
        for target in re.findall(r"uses: \./(\S+)|--constraint (\S+)|execute (\S+)", text):
            assert (ROOT / "".join(target)).exists(), (path.name, target)
        for target in re.findall(r"run: make (\S+)", text):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
