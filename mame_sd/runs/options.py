"""Declare fields of dataclasses that are options of commands, too."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(
    default: Any, help: str, *flags: str, metavar: str | None = None, positional: bool = False
) -> Any:
    """Declare a field of which `mame_sd.cli.options` makes an option.

    Args:
        default: default of the field.
        help: help text.
        flags: flags of the option. By default the field's name.
        metavar: name of the value in the help text. If None, the type decides.
        positional: if True, the value is given without a flag.
    """
    about = {"help": help, "flags": flags, "metavar": metavar, "positional": positional}
    return field(default=default, metadata=about)
