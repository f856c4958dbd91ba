"""Print what commands say: notes and progress on stderr, the result on stdout."""

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
from mame_sd.runs.options import option

_LONGEST_LINE = 2000  # characters of a line that may name a prompt or a cell of any length
FIRST_LINE = 10.0  # seconds before the first plain line of progress


@dataclass(frozen=True)
class Output:
    """Choose what a command prints: `quiet` omits notes and progress."""

    quiet: bool = option(False, "Print only the result.", "--quiet", "-q")
    as_json: bool = option(False, "Print the result as one JSON object.", "--json")


_DEFAULT = Output()
OUTPUT: ContextVar[Output] = ContextVar("output", default=_DEFAULT)  # of the running command


class Bar:
    """Show on stderr how many are done, the step of the current one, and the time left.

    A terminal shows a bar. Elsewhere plain lines come, the first after `FIRST_LINE` seconds.
    """

    def __init__(self, bar: Any, unit: str) -> None:
        self._bar, self._unit, self._done, self._total, self._before = bar, unit, 0, 0, 0
        self._task = None if bar is None else bar.add_task(unit, total=None, step="")
        self._start = time.monotonic()
        self._next = self._start + FIRST_LINE

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` are finished."""
        if total != self._total:  # images of an earlier call took no time in this one
            self._before = done
        self._done, self._total = done, total
        self._show(done, "")

    def step(self, step: int, steps: int) -> None:
        """Show that `step` of `steps` of the current one is done."""
        self._show(self._done + step / steps, f"step {step} of {steps}")

    def _show(self, done: float, step: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=self._total, step=step)
            return
        now = time.monotonic()
        if now < self._next or OUTPUT.get().quiet:
            return
        passed, made, left = now - self._start, self._done - self._before, self._total - self._done
        self._next = now + min(60.0, max(FIRST_LINE, passed / 10))
        parts = [f"{self._unit}: {self._done} of {self._total}", *([step] if step else [])]
        if left and made:
            parts.append(f"about {_duration(left * passed / made)} left")
        say(", ".join(parts))


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
    """Return a context with a `Bar` that shows progress on stderr.

    `unit` says what is counted, in the plural. If not `shown`, this process shows nothing.
    """
    from rich import progress as rich

    console = _stderr(shown)
    if shown and not console.is_terminal:
        yield Bar(None, unit)
        return
    texts = (rich.TextColumn("{task.description}"), rich.TextColumn("{task.fields[step]}"))
    columns = (rich.BarColumn(), rich.MofNCompleteColumn(), *texts, rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=console, transient=True) as bar:
        yield Bar(bar, unit)


@contextmanager
def doing(what: str, shown: bool = True) -> Iterator[None]:
    """Print on stderr what is running, immediately on a terminal, else after `FIRST_LINE` s."""
    console = _stderr(shown)
    timer = threading.Timer(FIRST_LINE, say, [f"{what} ..."])
    timer.daemon = True
    if shown and not console.is_terminal and not OUTPUT.get().quiet:
        timer.start()
    try:
        with console.status(f"{what} ..."):
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
        next_step: a command that uses the result, or empty.
    """
    if OUTPUT.get().as_json:
        print(json_text(values, indent=1), flush=True)
        return
    print(text, flush=True)
    if next_step and not OUTPUT.get().quiet:
        print(f"next: {next_step}")


def say(message: str) -> None:
    """Print one line on stderr, with control characters as escapes and a long middle left out."""
    if len(message) > _LONGEST_LINE:
        message = f"{message[: _LONGEST_LINE // 2]} ... {message[-_LONGEST_LINE // 2 :]}"
    line = message.replace("\n", " ")
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
    sys.stdout.flush()
    print(line, file=sys.stderr)


def note(text: str) -> None:
    """Print a note on stderr, unless --quiet is given."""
    if not OUTPUT.get().quiet:
        say(f"note: {text}")
