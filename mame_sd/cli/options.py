"""Options of commands made from dataclasses: a field is written once, with its type, default, help
and check.

A command takes whole groups of options as keyword-only parameters; `takes` puts the options of each
in their place:

    MODEL = FieldOptions(ModelChoice, "Model")

    @app.command("doctor")
    @takes(model=MODEL)
    def doctor_command(*, model: ModelChoice) -> None: ...

typer reads a signature and no dataclass, so `takes` gives it a signature.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer


def takes(**groups: FieldOptions) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the parameters named in `groups` by the options of their groups, `<group>_<option>`
    each.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name not in groups]
        options = {name: group.parameters() for name, group in groups.items()}
        expanded = own + [
            p.replace(name=f"{name}_{p.name}") for name, found in options.items() for p in found
        ]

        @functools.wraps(command)
        def with_options(**values: Any) -> None:
            arguments = {p.name: values[p.name] for p in own}
            for name, group in groups.items():
                given = {p.name: values[f"{name}_{p.name}"] for p in options[name]}
                arguments[name] = group.build(given)
            command(**arguments)

        with_options.__signature__ = signature.replace(parameters=expanded)  # type: ignore[attr-defined]
        with_options.__annotations__ = {p.name: p.annotation for p in expanded}
        del with_options.__wrapped__  # typer would look through it
        return with_options

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
    """A parameter that typer makes an option of, whose type is the annotation `kind` of a
    dataclass's field.

    `Literal` shows its values. `tuple[str, ...]` may be given again and again. A bool without a
    default has a --no- form.
    """
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (member for member in get_args(kind) if member is not NoneType)
    flags = flags or (flag_of(name),)
    if get_origin(kind) is Literal:
        kind, metavar = str, "|".join(get_args(kind))
    elif kind == tuple[str, ...]:
        kind, default = list[str], list(default)
    elif kind is bool and default is None:
        flags = (f"{flags[0]}/--no-{flags[0].removeprefix('--')}",)
    made = typer.Option(*flags, help=help, metavar=metavar, rich_help_panel=panel)
    annotation: Any = Annotated[kind if default is not None else kind | None, made]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")
