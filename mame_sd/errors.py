"""The two ways a command can fail, and the exit status each one means."""

from __future__ import annotations


class UserError(Exception):
    """The input is wrong: the message says what was expected, what came and what to do. Exit status 2."""


class MachineError(Exception):
    """The machine gave out (disk full, out of memory): the input may be fine. Exit status 1."""
