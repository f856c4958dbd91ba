"""docs/usage.md and comfyui/README.md hold: the examples run, the links and what the text names exist."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import mame_sd
from mame_sd import MaMeConfig, families, pipelines

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / "usage.md", ROOT / "docs" / "compatibility.md", ROOT / "comfyui" / "README.md"]
USAGE = PAGES[0].read_text(encoding="utf-8")
EXAMPLES = re.findall(r"<!-- test: python -->\n```python\n(.*?)```", USAGE, re.S)


@pytest.mark.parametrize("code", EXAMPLES, ids=["pipeline", "family"])
def test_examples_run(code: str) -> None:
    scope: dict[str, object] = {}
    exec(compile(code, "usage.md", "exec"), scope)
    if "image" in scope:
        assert scope["image"].size == (256, 256)  # type: ignore[attr-defined]
    else:
        assert families.family_names().count("MyTransformer2DModel") == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_settings_and_names_exist() -> None:
    settings = {field.name for field in fields(MaMeConfig)}
    assert set(re.findall(r"`(\w+)=", USAGE)) <= settings
    for name in ("apply_mame", "remove_mame", "mame", "MaMeAttnProcessor", "NothingMergedError"):
        assert name in USAGE
        assert hasattr(mame_sd, name)
    assert hasattr(pipelines, "StableDiffusionMaMePipeline")
