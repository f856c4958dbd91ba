"""The examples of docs/perception.md run, and its tables of arguments and models name what there
is.
"""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

from benchmarks.encoders import counted
from mame_sd import apply_mame, remove_mame
from mame_sd.cli.app import app
from mame_sd.eval.cli.app import app as evaluation
from mame_sd.perception.apply_encoder import apply_encoder
from tests.builders.perception import NAMED
from tests.builders.tiny import seeded

DOCS = Path(__file__).parents[2] / "docs"
USAGE, CLASSIFY, CACHES = (
    (DOCS / name).read_text(encoding="utf-8")
    for name in ("perception.md", "perception-classify.md", "kv-cache.md")
)
PAGE = USAGE + CLASSIFY
COMMANDS = re.findall(r"^(?:    )?(mame-sd(?:-eval)? .*?)(?:  #.*)?$", PAGE + CACHES, re.M)
EXAMPLES = re.findall(r"<!-- test: python -->\n```python\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.splitlines()[0][:40])
@torch.no_grad()
def test_examples_run(code: str) -> None:
    row = NAMED["DeiTForImageClassification"]
    tiny = row.build()
    model = seeded(
        type(tiny), 0, type(tiny.config)(**{**tiny.config.to_dict(), "num_hidden_layers": 10})
    )
    scope = {
        "model": model,
        "encoder": model.deit,
        **row.batch(),
        "apply_mame": apply_mame,
        "remove_mame": remove_mame,
    }
    exec(compile(code, "perception.md", "exec"), scope)


def test_arguments_are_those_of_the_function() -> None:
    parameters = inspect.signature(apply_encoder).parameters.values()
    own = {one.name for one in parameters if one.kind == one.KEYWORD_ONLY}
    assert own | {"tau", "keep"} == set(re.findall(r"^\| `(\w+)` \|", USAGE, re.M))


def test_commands_parse() -> None:
    assert len(COMMANDS) > 5
    for line in COMMANDS:
        program, name, *words = shlex.split(line)
        group: Any = get_command(evaluation if program == "mame-sd-eval" else app)
        context = group.make_context(program, [name], resilient_parsing=True)
        sub = group.get_command(context, name)
        assert sub is not None, f"no command {name}"
        sub.make_context(name, words)


def test_tome_s_r_is_a_keep_for_each_block() -> None:
    keep = [(n - 16) / n for n in range(196, 4, -16)]
    assert "keep=[(n - 16) / n for n in range(196, 4, -16)]" in PAGE
    tokens = [block.tokens_kept for block in counted("ViT-B", tuple(range(12)), keep).blocks]
    assert tokens == [*range(181, 4, -16)]
