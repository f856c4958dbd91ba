"""Options of commands made from dataclasses: a field is written once, with its type, default, help
and check.

A command takes whole groups of options as keyword-only parameters; `command` puts the options of
each in their place, and gives every command --quiet and --json:

    MODEL = FieldOptions(ModelChoice, "Model")

    @command(app, "doctor", model=MODEL)
    def doctor_command(*, model: ModelChoice) -> None: ...

typer reads a signature and no dataclass, so `command` gives it a signature.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from mame_sd.cli.console import OUTPUT, Output

# What help texts show for a value of a type; typer shows `<bool>` and `list[Path]`.
METAVARS = {bool: "", int: "NUMBER", float: "NUMBER", str: "TEXT", Path: "PATH"}
NARROW = 12  # characters of alternatives that fit where a help text shows the kind of value


class _PlainHelp:
    """Shows no type of Python next to arguments and to options that take no value."""

    def get_params(self, context: Any) -> list[Any]:
        found: list[Any] = super().get_params(context)  # type: ignore[misc]
        for parameter in found:
            if parameter.metavar is None and getattr(parameter, "is_flag", False):
                parameter.metavar = ""
            if parameter.param_type_name == "argument":  # typer shows `list[Path]` there
                parameter.display_type_rich = lambda ctx: None
        return found


class Command(_PlainHelp, TyperCommand):
    """A command."""


class Group(_PlainHelp, TyperGroup):
    """A program of commands."""


def program(name: str, about: str) -> typer.Typer:
    """Return an empty program, which has --version and shows its help where no command is given.

    Args:
        name: of the console script.
        about: its help text.
    """

    def print_version(wanted: bool) -> None:
        if wanted:
            from importlib.metadata import version

            print(f"{name} {version('mame-sd')}")
            raise typer.Exit

    version_option: Any = typer.Option(
        False,
        "--version",
        help="Print the version and end.",
        metavar="",
        callback=print_version,
        is_eager=True,
    )

    def no_command(context: typer.Context, version: bool = version_option) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help(), end="")
            raise typer.Exit(2)

    app = typer.Typer(
        cls=Group,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback(invoke_without_command=True, help=about)(no_command)
    return app


def command(
    app: typer.Typer, name: str, /, **groups: FieldOptions
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a command, whose parameters named in `groups` are replaced by the options of their
    groups, `<group>_<option>` each.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name not in groups]
        options = {group: found.parameters() for group, found in groups.items()}
        expanded = [*own, *_OUTPUT_OPTIONS] + [
            p.replace(name=f"{group}_{p.name}") for group, found in options.items() for p in found
        ]

        @functools.wraps(function)
        def with_options(**values: Any) -> None:
            OUTPUT.set(Output(*(values[p.name] for p in _OUTPUT_OPTIONS)))
            arguments = {p.name: values[p.name] for p in own}
            for group, fields_of in groups.items():
                given = {p.name: values[f"{group}_{p.name}"] for p in options[group]}
                arguments[group] = fields_of.build(given)
            function(**arguments)

        with_options.__signature__ = signature.replace(parameters=expanded)  # type: ignore[attr-defined]
        with_options.__annotations__ = {p.name: p.annotation for p in expanded}
        del with_options.__wrapped__  # typer would look through it
        app.command(name, cls=Command)(with_options)
        return function

    return decorate


class FieldOptions:
    """The options of a dataclass, one for each field that has a help text; they make one argument
    of a command: an instance.

    Args:
        panel: heading of these options in the help text.
        without: names of fields that are no options here; those whose metadata say `option` False
            are none anywhere.
        help: help texts, by field, in the place of the dataclass's own.
        otherwise: whose value a field has that is not given, for the help text ("": it says
            nothing of that). With it no option has a default, and the argument is a dict of those
            that were given.
    """

    def __init__(
        self,
        kind: type,
        panel: str | None = None,
        without: Iterable[str] = (),
        help: Mapping[str, str] | None = None,
        otherwise: str | None = None,
    ) -> None:
        self._kind, self._panel, self._help, self._otherwise = kind, panel, help or {}, otherwise
        left_out = set(without)
        self._fields = [
            f
            for f in fields(kind)
            if "help" in f.metadata and f.metadata.get("option", True) and f.name not in left_out
        ]

    def parameters(self) -> list[inspect.Parameter]:
        """One keyword-only parameter for each option, annotated for typer."""
        hints = get_type_hints(self._kind)
        return [
            keyword(
                f.name,
                hints[f.name],
                self.default(f),
                self.help(f),
                *(f.metadata.get("flags") or (self.flag(f.name),)),
                panel=self._panel,
                metavar=f.metadata.get("metavar"),
            )
            for f in self._fields
        ]

    def build(self, values: Mapping[str, Any]) -> Any:
        """The command's argument of the options' values by parameter name."""
        if self._otherwise is not None:
            return {f.name: values[f.name] for f in self._fields if values[f.name] is not None}
        return self._kind(
            **{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        )

    def flag(self, name: str) -> str:
        return flag_of(name)

    def default(self, f: Field[Any]) -> Any:
        return f.default if self._otherwise is None else None

    def help(self, f: Field[Any]) -> str:
        help = str(self._help.get(f.name, f.metadata["help"]))
        if self._otherwise is None:
            return help
        if not self._otherwise:
            return f"{help[:1].upper()}{help[1:].removesuffix('.')}."
        return f"{help.partition('. ')[0].rstrip('.')}. Without it, {self._otherwise}."


def keyword(
    name: str,
    kind: Any,
    default: Any,
    help: str,
    *flags: str,
    panel: str | None = None,
    metavar: str | None = None,
) -> inspect.Parameter:
    """Return a parameter that typer makes an option of.

    `tuple[str, ...]` may be given again and again. A bool without a default has a --no- form.

    Args:
        kind: the annotation of a dataclass's field.
        flags: of the option; `--name` unless given.
        panel: heading of the option in the help text.
        metavar: what stands for the value in the help text; None: by the type. A `Literal` shows
            its values, here or in its help.
    """
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (member for member in get_args(kind) if member is not NoneType)
    flags = flags or (flag_of(name),)
    if get_origin(kind) is Literal:
        values, kind = get_args(kind), str
        metavar = "|".join(values)
        if len(metavar) > NARROW:
            metavar, help = "NAME", f"{help} One of {', '.join(values)}."
    elif kind == tuple[str, ...]:
        kind, default = list[str], list(default)
    elif kind is bool and default is None:
        flags = (f"{flags[0]}/--no-{flags[0].removeprefix('--')}",)
    metavar = METAVARS.get(kind) if metavar is None else metavar
    made = typer.Option(*flags, help=help, metavar=metavar, rich_help_panel=panel)
    annotation: Any = Annotated[kind if default is not None else kind | None, made]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


_OUTPUT_OPTIONS = (
    keyword("quiet", bool, False, "No notes and no progress: the result alone.", "--quiet", "-q"),
    keyword("as_json", bool, False, "Print the result as one JSON object.", "--json"),
)
