"""Fields of dataclasses that the command line offers as options: each is written once, with its
type, default and help.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str, *flags: str, metavar: str | None = None) -> Any:
    """A dataclass field that is an option, too: `mame_sd.cli.options` makes it from the field's
    annotation and this.

    Args:
        flags: those of the option; its flag is the field's name unless given.
        metavar: what stands for the value in the help text.
    """
    return field(default=default, metadata={"help": help, "flags": flags, "metavar": metavar})
