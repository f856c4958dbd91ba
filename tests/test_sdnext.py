"""The module of docs/sdnext.md, called as SD.Next calls its own.

That is around each generation, with SD.Next's options.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL

from tests.builders.tiny import generate, tiny_pipeline, tiny_vae

PAGE = Path(__file__).parents[1] / "docs" / "sdnext.md"
SIDE = {"height": 64, "width": 64}  # 1024 tokens at the largest level


class Engine:
    """What the module imports from SD.Next: its options and its log."""

    def __init__(self) -> None:
        self.opts = SimpleNamespace(token_merging_method="ToMe", tome_ratio=0.5)
        self.said: list[tuple[str, str]] = []

    def __getattr__(self, level: str) -> Any:
        return lambda text: self.said.append((level, text))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    modules: Any = ModuleType("modules")
    logger: Any = ModuleType("modules.logger")
    modules.shared, logger.log = SimpleNamespace(opts=engine.opts), engine
    monkeypatch.setitem(sys.modules, "modules", modules)
    monkeypatch.setitem(sys.modules, "modules.logger", logger)
    return engine


@pytest.fixture
def module(engine: Engine) -> Any:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code) == 1
    module = ModuleType("token_merge")
    exec(compile(code[0], str(PAGE), "exec"), module.__dict__)
    return module


def test_merges_between_the_two_calls(engine: Engine, module: Any) -> None:
    pipe = tiny_pipeline()
    plain = generate(pipe, **SIDE)
    images = []
    for ratio in (0.5, 0.5, 0.75):
        engine.opts.tome_ratio = ratio
        module.apply_token_merging(pipe)
        images.append(generate(pipe, **SIDE))
        module.remove_token_merging(pipe)
        assert torch.equal(generate(pipe, **SIDE), plain)
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], plain)
    assert not torch.equal(images[0], images[2])
    assert [level for level, _ in engine.said] == ["info", "debug"] * 3


def test_options_of_a_job_go_over_the_settings_and_off_is_off(engine: Engine, module: Any) -> None:
    pipe = tiny_pipeline()
    module.apply_token_merging(pipe, SimpleNamespace(token_merging_method=None, tome_ratio=0.75))
    assert pipe.mame.config.keep == 0.25
    module.apply_token_merging(pipe, SimpleNamespace(tome_ratio=0.0))
    assert pipe.mame is None
    engine.opts.token_merging_method = "None"
    module.apply_token_merging(pipe)
    assert pipe.mame is None


def test_says_where_it_can_not_merge(engine: Engine, module: Any) -> None:
    pipe = tiny_pipeline()
    module.apply_token_merging(pipe)
    generate(pipe)  # 256 tokens: fewer than min_tokens
    module.remove_token_merging(pipe)
    vae: AutoencoderKL = tiny_vae()
    module.apply_token_merging(SimpleNamespace(unet=vae))
    engine.opts.tome_ratio = 1.0
    module.apply_token_merging(pipe)
    warnings = [text for level, text in engine.said if level == "warning"]
    assert len(warnings) == 3
    assert "fewer than 1,024 tokens" in warnings[0]
    assert "keep: expected" in warnings[2]
