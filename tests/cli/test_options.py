"""Options made from dataclasses: each kind of field, and groups side by side in one command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import typer

from mame_sd.cli.options import FieldOptions, takes
from mame_sd.runs.options import option


@dataclass(frozen=True)
class Fields:
    number: int = option(1, "A number. Of something.")
    text: str | None = option(None, "A text.", "--words")
    kind: Literal["a", "b"] | None = option(None, "A kind.")
    names: tuple[str, ...] = option((), "A name. Repeatable.", "--name")
    on: bool = option(False, "A switch.")
    own: float = 2.5  # no help text: no option


def call(arguments: str, **groups: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    app = typer.Typer(add_completion=False)

    @app.command()
    @takes(**groups)
    def command(*, first: Any = None, second: Any = None) -> None:
        found.update(first=first, second=second)

    app(arguments.split(), standalone_mode=False)
    return found


def test_every_kind_of_field_is_an_option() -> None:
    group = FieldOptions(Fields)
    assert call("", first=group)["first"] == Fields()
    given = "--number 3 --words x --kind b --name u --name v --on"
    assert call(given, first=group)["first"] == Fields(3, "x", "b", ("u", "v"), True)


def test_options_without_defaults_give_what_was_given() -> None:
    group = FieldOptions(Fields, "Panel", without=("names", "text"), otherwise="the suite's")
    assert call("", first=group)["first"] == {}
    assert call("--number 3 --no-on", first=group)["first"] == {"number": 3, "on": False}
    helps = [p.annotation.__metadata__[0].help for p in group.parameters()]
    assert helps[0] == "A number. Without it, the suite's."


def test_groups_with_fields_of_one_name_stand_side_by_side() -> None:
    @dataclass(frozen=True)
    class Other:
        number: int = option(7, "Another number.", "--other")

    found = call("--other 8 --number 2", first=FieldOptions(Fields), second=FieldOptions(Other))
    assert (found["first"].number, found["second"].number) == (2, 8)
