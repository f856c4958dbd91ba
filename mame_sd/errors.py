"""The two ways a command can fail, and the exit status each one means."""

from __future__ import annotations


class UserError(Exception):
    """The input is wrong: the message says what was expected, what came and what to do.

    Exit status 2.
    """


class MachineError(Exception):
    """The machine failed (disk full, out of memory): the input may be fine. Exit status 1."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type, without a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    return line.rstrip(".") if len(line) <= 200 else line[:197] + "..."
