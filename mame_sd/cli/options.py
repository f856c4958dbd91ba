"""Make the options of commands from dataclasses: a field has its type, default and help once.

A command takes each group of options as one keyword-only parameter. `command` replaces it by the
options of its fields, and gives every command --quiet and --json:

    @command(app, "doctor", model=MODEL)
    def doctor_command(*, model: ModelChoice) -> None: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from mame_sd.cli.console import OUTPUT, Output

# What help texts show for a value of a type, where typer shows `<bool>` and `list[Path]`.
METAVARS = {bool: "", int: "NUMBER", float: "NUMBER", str: "TEXT", Path: "PATH"}


class _PlainHelp:
    """Help that shows no Python types next to arguments and to options without a value."""

    def get_params(self, context: Any) -> list[Any]:
        found: list[Any] = super().get_params(context)  # type: ignore[misc]
        for parameter in found:
            if parameter.metavar is None and getattr(parameter, "is_flag", False):
                parameter.metavar = ""
            if parameter.param_type_name == "argument":
                parameter.display_type_rich = lambda ctx: None
        return found


class Command(_PlainHelp, TyperCommand):
    """A command."""


class Group(_PlainHelp, TyperGroup):
    """A program of commands."""


def program(name: str, about: str) -> typer.Typer:
    """Return a program without commands, which has --version and shows its help by default.

    Args:
        name: name of the console script.
        about: help text.
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


class FieldOptions:
    """The options of a dataclass, one for each field that `mame_sd.runs.options.option` declares.

    Args:
        kind: the dataclass. A command gets an instance of it.
        panel: heading of these options in the help text.
        without: names of fields that get no option here.
        defaults: defaults by field name, instead of those of the dataclass.
        help: help texts by field name, instead of those of the dataclass.
        given_only: if True, no option has a default, and the command gets a dict of the given ones.
    """

    def __init__(
        self,
        kind: type,
        panel: str | None = None,
        without: Collection[str] = (),
        defaults: Mapping[str, Any] | None = None,
        help: Mapping[str, str] | None = None,
        given_only: bool = False,
    ) -> None:
        self._kind, self._given_only = kind, given_only
        hints = get_type_hints(kind)
        self.parameters = [
            keyword(
                f.name,
                hints[f.name],
                None if given_only else (defaults or {}).get(f.name, f.default),
                (help or {}).get(f.name, f.metadata["help"]),
                *f.metadata["flags"],
                panel=panel,
                metavar=f.metadata["metavar"],
            )
            for f in fields(kind)
            if "flags" in f.metadata and f.name not in without
        ]

    def build(self, values: Mapping[str, Any]) -> Any:
        """Return the command's argument made of the options' values by field name."""
        if self._given_only:
            return {name: value for name, value in values.items() if value is not None}
        tuples = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return self._kind(**tuples)


def keyword(
    name: str,
    kind: Any,
    default: Any,
    help: str,
    *flags: str,
    panel: str | None = None,
    metavar: str | None = None,
) -> inspect.Parameter:
    """Return a keyword-only parameter that typer makes an option of.

    Args:
        name: name of the parameter.
        kind: its annotation. An option of `tuple[str, ...]` may be given repeatedly.
        default: its default.
        help: help text of the option.
        flags: flags of the option. By default its name.
        panel: heading of the option in the help text.
        metavar: name of the value in the help text. If None, the type decides.
    """
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (member for member in get_args(kind) if member is not NoneType)
    if kind == tuple[str, ...]:
        kind, default = list[str], list(default)
    made = typer.Option(
        *(flags or ("--" + name.replace("_", "-"),)),
        help=help,
        metavar=METAVARS.get(kind) if metavar is None else metavar,
        rich_help_panel=panel,
    )
    annotation: Any = Annotated[kind if default is not None else kind | None, made]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


_OUTPUT = (
    keyword("quiet", bool, False, "Print the result alone.", "--quiet", "-q"),
    keyword("as_json", bool, False, "Print the result as one JSON object.", "--json"),
)


def command(
    app: typer.Typer, name: str, /, **groups: FieldOptions
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a command whose parameters in `groups` are groups of options."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name not in groups]
        prefixed = {
            (group, p.name): p.replace(name=f"{group}_{p.name}")
            for group, options in groups.items()
            for p in options.parameters
        }

        def with_options(**values: Any) -> None:
            OUTPUT.set(Output(values.pop("quiet"), values.pop("as_json")))
            given: dict[str, dict[str, Any]] = {group: {} for group in groups}
            for (group, field), p in prefixed.items():
                given[group][field] = values.pop(p.name)
            function(**values, **{g: options.build(given[g]) for g, options in groups.items()})

        parameters = [*own, *_OUTPUT, *prefixed.values()]
        with_options.__doc__ = function.__doc__
        with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, cls=Command)(with_options)
        return function

    return decorate
