"""docs/kv-cache.md holds: its examples run, and its commands parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import typer
from typer.main import get_command

from mame_sd.eval.cli.app import app
from tests.caches.tiny import prompt, tiny

TEXT = (Path(__file__).parents[2] / "docs" / "kv-cache.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.S)
COMMANDS = re.findall(r"^    (mame-sd-eval .*)$", TEXT, re.M)


def test_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    ids = prompt(64)
    scope = {
        "model": tiny("llama"),
        "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
    }
    assert len(EXAMPLES) == 2
    for code in EXAMPLES:
        exec(compile(code, "kv-cache.md", "exec"), scope)
        assert scope["answer"].shape == (1, 128)  # type: ignore[attr-defined]
    assert "2 layers: 14 of 64 keys stay" in capsys.readouterr().out


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line: str) -> None:
    words = shlex.split(line)[1:]
    command = get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    sub = command.get_command(
        command.make_context("mame-sd-eval", words[:1], resilient_parsing=True), words[0]
    )
    assert sub is not None
    sub.make_context(words[0], words[1:])
