"""Define the two ways in which a command can fail, with their exit codes."""

from __future__ import annotations


class UserError(Exception):
    """The input is wrong. The message says what was expected, what came and what to do.

    The exit code is 2.
    """


class MachineError(Exception):
    """The machine failed (full disk, no memory), but the input may be valid. The exit code is 1."""


def unexpected(where: str, expected: str, got: object, advice: str) -> UserError:
    """Return an error in the form of all of them.

    >>> str(unexpected("--steps", "at least 1", 0, "raise it"))
    '--steps: expected at least 1, got 0; raise it'

    Args:
        where: the option, or the file and line.
        expected: what is allowed.
        got: what came.
        advice: what to do.
    """
    return UserError(f"{where}: expected {expected}, got {got}; {advice}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without a full stop, or the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    return line.rstrip(".") if len(line) <= 200 else line[:197] + "..."
