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
from importlib import metadata
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from mame_sd.cli.console import OUTPUT, Output

_VersionOption = Annotated[
    bool, typer.Option("--version", help="Print the version and end.", metavar="")
]

# What help texts show for a value of a type, where typer shows its name in Python.
_METAVARS = {bool: "", int: "NUMBER", float: "NUMBER", str: "TEXT", Path: "PATH"}


class _PlainHelp:
    """Help texts without Python's types, and errors that name the command."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        try:
            return super().parse_args(context, arguments)  # type: ignore[misc]
        except Exception as error:  # an option without its value has no context
            if getattr(error, "ctx", context) is None:
                error.ctx = context  # type: ignore[attr-defined]
            raise

    def get_params(self, context: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(context)  # type: ignore[misc]
        for parameter in parameters:
            if parameter.param_type_name == "argument":
                parameter.display_type_rich = lambda ctx: None
            elif parameter.metavar is None and getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class Command(_PlainHelp, TyperCommand):
    """A command."""


class Group(_PlainHelp, TyperGroup):
    """A program of commands."""


def program(name: str, about: str) -> typer.Typer:
    """Return a program without commands, which has --version and shows its help by default.

    `name` is that of the console script, and `about` the help text.
    """

    def no_command(context: typer.Context, version: _VersionOption = False) -> None:
        if version:
            print(f"{name} {metadata.version('mame-sd')}")
            raise typer.Exit
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
        defaults, help, hints = defaults or {}, help or {}, get_type_hints(kind)
        self.parameters = []
        for f in fields(kind):
            if "flags" not in f.metadata or f.name in without:
                continue
            default = None if given_only else defaults.get(f.name, f.default)
            hint = hints[f.name]
            kinds = [one for one in (*get_args(hint), hint) if one is not NoneType]
            if hint == tuple[str, ...]:  # may be given repeatedly
                hint, default = list[str], list(default or ())
            about: dict[str, Any] = {
                "help": help.get(f.name, f.metadata["help"]),
                "metavar": f.metadata["metavar"] or _METAVARS.get(kinds[0]),
                "rich_help_panel": panel,
            }
            flags = f.metadata["flags"] or ("--" + f.name.replace("_", "-"),)
            positional = f.metadata["positional"]
            made = typer.Argument(**about) if positional else typer.Option(*flags, **about)
            annotation: Any = Annotated[hint if default is not None else hint | None, made]
            parameter = inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
            self.parameters.append(parameter)

    def build(self, values: dict[str, Any]) -> Any:
        """Take the values of these options out of `values`, and return the command's argument."""
        taken = {p.name: values.pop(p.name) for p in self.parameters}
        if self._given_only:
            return {name: value for name, value in taken.items() if value is not None}
        tuples = {name: tuple(v) if isinstance(v, list) else v for name, v in taken.items()}
        return self._kind(**tuples)


def command(
    app: typer.Typer, name: str, /, **groups: FieldOptions
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a command to `app`; each of `groups` is a parameter of it."""
    every = {"output": FieldOptions(Output), **groups}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        parameters = [p for p in signature.parameters.values() if p.name not in groups]
        parameters += [p for options in every.values() for p in options.parameters]

        def with_options(**values: Any) -> None:
            built = {group: options.build(values) for group, options in every.items()}
            OUTPUT.set(built.pop("output"))
            function(**values, **built)

        with_options.__doc__ = function.__doc__
        with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, cls=Command)(with_options)
        return function

    return decorate
