"""What the commands say on a terminal while they work: notes and a progress bar, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LONGEST_LINE = 2000  # characters, of a line that may name a prompt or a cell of any length


class Bar:
    """A bar on stderr: images done, the step of the one under way, images per second, time left."""

    def __init__(self, bar: Any, unit: str) -> None:
        self._bar, self._unit = bar, unit
        self._task = bar.add_task(unit, total=None, rate="", step="")
        self._done = self._total = 0

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` images are finished."""
        elapsed = self._bar.tasks[0].elapsed or 0.0
        rate = f"{done / elapsed:.2f} {self._unit}/s" if done and elapsed else ""
        self._done, self._total = done, total
        self._bar.update(self._task, completed=done, total=total, rate=rate, step="")

    def step(self, step: int, steps: int) -> None:
        """`step` of `steps` of the image under way is done."""
        said = f"step {step} of {steps}"
        self._bar.update(self._task, completed=self._done + step / steps, step=said)


@contextmanager
def progress(unit: str, shown: bool = True) -> Iterator[Bar]:
    """A bar on stderr, where that is a terminal; gives what to tell of images and steps."""
    from rich import progress as rich

    fields = (rich.TextColumn("{task.fields[step]}"), rich.TextColumn("{task.fields[rate]}"))
    columns = (rich.BarColumn(), rich.MofNCompleteColumn(), *fields, rich.TimeRemainingColumn())
    console = _stderr()
    off = not (shown and console.is_terminal)
    with rich.Progress(*columns, console=console, disable=off, transient=True) as bar:
        yield Bar(bar, unit)


@contextmanager
def doing(what: str, shown: bool = True) -> Iterator[None]:
    """Says on stderr, where that is a terminal, what takes a while."""
    console = _stderr()
    if not (shown and console.is_terminal):
        yield
        return
    with console.status(f"{what} ..."):
        yield


def _stderr() -> Any:
    from rich.console import Console

    return Console(stderr=True)


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
