"""docs/usage.md holds: the examples run, and what the text names exists."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import mame_sd
from mame_sd import MaMeConfig, pipelines
from mame_sd.diffusion.families.family import REGISTERED
from mame_sd.families import Family
from tests.builders.tiny import tiny_pipeline, tiny_unet

ROOT = Path(__file__).parents[1]
USAGE = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"<!-- test: python -->\n```python\n(.*?)```", USAGE, re.S)


def _run(code: str) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(compile(code, "usage.md", "exec"), scope)
    return scope


def _small() -> Any:
    """A tiny pipeline in the place of the embedded one, whose first level has 1,024 tokens too."""
    pipe = tiny_pipeline()
    pipe.register_modules(unet=tiny_unet(sample_size=32))
    return pipe


def test_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mame_sd, "embedded_pipeline", _small)
    pipeline, half_of_the_steps, cached, family = EXAMPLES
    assert _run(pipeline)["image"].size == (64, 64)
    scope = _run(half_of_the_steps)
    assert scope["image"].size == (64, 64)
    assert scope["handle"].active is False
    assert scope["handle"].report().layers
    scope = _run(cached)
    assert scope["image"].size == (64, 64)
    assert {layer.calls for layer in scope["handle"].report().layers if layer.merged} == {2, 4}
    _run(family)
    assert "MyTransformer2DModel" in REGISTERED


def test_settings_and_names_exist() -> None:
    settings = {field.name for kind in (MaMeConfig, Family) for field in fields(kind)}
    assert set(re.findall(r"`(\w+)=", USAGE)) <= settings
    for name in ("apply_mame", "remove_mame", "mame", "MaMeAttnProcessor", "NothingMergedError"):
        assert name in USAGE
        assert hasattr(mame_sd, name)
    assert hasattr(pipelines, "StableDiffusionMaMePipeline")
