"""What the commands say: notes and progress on stderr, the result on stdout."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from mame_sd.json_files import json_text

_LONGEST_LINE = 2000  # characters, of a line that may name a prompt or a cell of any length
FIRST_LINE = 10.0  # seconds before the first plain line of progress


@dataclass(frozen=True)
class Output:
    """What a call of a command prints.

    Attributes:
        quiet: no notes and no progress.
        as_json: the result as one JSON object on stdout.
    """

    quiet: bool = False
    as_json: bool = False


_PLAIN = Output()
OUTPUT: ContextVar[Output] = ContextVar("output", default=_PLAIN)  # of the call under way


class Bar:
    """Progress on stderr: how many are done, the step of the one under way, the time left.

    A terminal shows a bar. Elsewhere plain lines come, the first one after `FIRST_LINE` seconds.
    """

    def __init__(self, bar: Any, unit: str) -> None:
        self._bar, self._unit, self._done, self._total, self._started = bar, unit, 0, 0, 0
        self._task = None if bar is None else bar.add_task(unit, total=None, step="")
        self._start = time.monotonic()
        self._next = self._start + FIRST_LINE

    def __call__(self, done: int, total: int) -> None:
        """Tell that `done` of `total` are finished."""
        if total != self._total:  # what an earlier call has finished takes no time now
            self._started = done
        self._done, self._total = done, total
        if self._bar is None:
            self._line("")
        else:
            self._bar.update(self._task, completed=done, total=total, step="")

    def step(self, step: int, steps: int) -> None:
        """Tell that `step` of `steps` of the one under way is done."""
        said = f"step {step} of {steps}"
        if self._bar is None:
            self._line(f", {said}")
        else:
            self._bar.update(self._task, completed=self._done + step / steps, step=said)

    def _line(self, said: str) -> None:
        now = time.monotonic()
        if now < self._next or OUTPUT.get().quiet:
            return
        passed, made = now - self._start, self._done - self._started
        self._next = now + min(60.0, max(FIRST_LINE, passed / 10))
        left = self._total - self._done
        if left and made:
            said += f", about {_duration(left * passed / made)} left"
        say(f"{self._unit}: {self._done} of {self._total}{said}")


def _duration(seconds: float) -> str:
    """Return a time in the unit that suits it.

    >>> [_duration(seconds) for seconds in (12.3, 600, 9000)]
    ['12 s', '10 min', '2.5 h']
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def progress(unit: str, shown: bool = True) -> Iterator[Bar]:
    """Show progress on stderr for a `with` block, which tells the `Bar` of it.

    Args:
        unit: what is counted, in the plural.
        shown: whether this process shows anything.
    """
    from rich import progress as rich

    console = _stderr(shown)
    if not console.is_terminal and shown:
        yield Bar(None, unit)
        return
    texts = (rich.TextColumn("{task.description}"), rich.TextColumn("{task.fields[step]}"))
    columns = (rich.BarColumn(), rich.MofNCompleteColumn(), *texts, rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=console, transient=True) as bar:
        yield Bar(bar, unit)


@contextmanager
def doing(what: str, shown: bool = True) -> Iterator[None]:
    """Say on stderr what takes a while: at once on a terminal, elsewhere after `FIRST_LINE`
    seconds.
    """
    console = _stderr(shown)
    if console.is_terminal or not shown or OUTPUT.get().quiet:
        with console.status(f"{what} ..."):
            yield
        return
    timer = threading.Timer(FIRST_LINE, say, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _stderr(shown: bool) -> Any:
    from rich.console import Console

    console = Console(stderr=True)
    console.quiet = OUTPUT.get().quiet or not (shown and console.is_terminal)
    return console


def answer(text: str, values: Any, next_step: str = "") -> None:
    """Print a command's result on stdout.

    Args:
        text: the result for people.
        values: the result as JSON values, printed instead if --json is given.
        next_step: a command that uses the result; empty if there is none.
    """
    if OUTPUT.get().as_json:
        print(json_text(values, indent=1))
        return
    print(text)
    if next_step and not OUTPUT.get().quiet:
        print(f"next: {next_step}")


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
    """Say on stderr what a user should know, unless --quiet is given."""
    if not OUTPUT.get().quiet:
        say(f"note: {text}")
