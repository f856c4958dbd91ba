"""What the commands say on a terminal while they work: notes and a progress bar, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

_LONGEST_LINE = 2000  # characters, of a line that may name a prompt or a cell of any length


class Bar:
    """A bar on stderr: what is done, the step of what is under way, the time left."""

    def __init__(self, bar: Any, unit: str) -> None:
        self._bar, self._done = bar, 0
        self._task = bar.add_task(unit, total=None, step="")

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` are finished."""
        self._done = done
        self._bar.update(self._task, completed=done, total=total, step="")

    def step(self, step: int, steps: int) -> None:
        """`step` of `steps` of the one under way is done."""
        said = f"step {step} of {steps}"
        self._bar.update(self._task, completed=self._done + step / steps, step=said)


@contextmanager
def progress(unit: str, shown: bool = True) -> Iterator[Bar]:
    """A bar on stderr, where that is a terminal; gives what to tell of those done and of steps."""
    from rich import progress as rich

    texts = (rich.TextColumn("{task.description}"), rich.TextColumn("{task.fields[step]}"))
    columns = (rich.BarColumn(), rich.MofNCompleteColumn(), *texts, rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=_stderr(shown), transient=True) as bar:
        yield Bar(bar, unit)


def doing(what: str, shown: bool = True) -> AbstractContextManager[Any]:
    """Says on stderr, where that is a terminal, what takes a while."""
    status: AbstractContextManager[Any] = _stderr(shown).status(f"{what} ...")
    return status


def _stderr(shown: bool) -> Any:
    from rich.console import Console

    console = Console(stderr=True)
    console.quiet = not (shown and console.is_terminal)
    return console


def say(message: str) -> None:
    """One line on stderr. Line ends and control characters in a message (file names, prompts) are
    escaped. Its middle is left out where it is long.
    """
    if len(message) > _LONGEST_LINE:
        message = f"{message[: _LONGEST_LINE // 2]} ... {message[-_LONGEST_LINE // 2 :]}"
    line = message.replace("\n", " ")
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
    sys.stdout.flush()
    print(line, file=sys.stderr)  # which escapes what the terminal lacks


def note(text: str) -> None:
    say(f"note: {text}")
