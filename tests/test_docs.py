"""The README holds: its Python examples run, its tables match the code, its links and commands exist."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from mame_sd.cli.app import app
from mame_sd.config import MaMeConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"<!-- test: python -->\n```python\n(.*?)```", README, re.S)
COMMANDS = [line.split("  #")[0] for line in re.findall(r"^mame-sd .*$", README, re.M)]


def settings_table() -> str:
    """The README's table of settings, made from the dataclass."""
    default = MaMeConfig()
    rows = []
    for field in fields(MaMeConfig):
        value = getattr(default, field.name)
        rows.append(
            f"| `{field.name}` | {'' if value is None else f'`{value}`'} | {field.metadata['help'].replace('|', chr(92) + '|')} |"
        )
    return "\n".join(rows)


def test_the_settings_table_is_that_of_the_dataclass() -> None:
    assert settings_table() in README, f"expected this table in README.md:\n{settings_table()}"


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.splitlines()[-1][:40])
def test_python_examples_run(code: str) -> None:
    scope: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), scope)
    assert scope["image"].size == (256, 256)  # type: ignore[attr-defined]


def test_there_are_examples_to_run() -> None:
    assert len(EXAMPLES) >= 3
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line: str) -> None:
    words = shlex.split(line)[1:]
    command = get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    context = command.make_context("mame-sd", words[:1], resilient_parsing=True)
    sub = command.get_command(context, words[0])
    assert sub is not None, f"no command {words[0]}"
    sub.make_context(words[0], words[1:])


def test_modules_and_scripts_of_every_page_have_the_options_it_gives() -> None:
    found = 0
    for page in (README, *(file.read_text(encoding="utf-8") for file in (ROOT / "docs").glob("*.md"))):
        for line in re.findall(r"python (?:-m )?((?:benchmarks\.|scripts/)[^`\n]+)", page):
            target, *words = shlex.split(line)
            source = ROOT / (target if target.startswith("scripts/") else target.replace(".", "/") + ".py")
            options = set(re.findall(r'"(--[\w-]+)"', source.read_text(encoding="utf-8")))
            assert {word for word in words if word.startswith("--")} <= options, line
            found += 1
    assert found > 10


@pytest.mark.parametrize("target", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


def test_every_option_has_help() -> None:
    command = get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    for name, sub in command.commands.items():
        for parameter in sub.params:
            assert getattr(parameter, "help", None) or parameter.param_type_name == "argument", (
                f"{name} {parameter.name}"
            )
