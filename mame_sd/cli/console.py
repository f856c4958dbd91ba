"""Print what commands say: notes and progress on stderr, the result on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
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

    def __init__(self, bar: Any, unit: str, plain: bool) -> None:
        self._bar, self._unit, self._plain, self._done, self._total = bar, unit, plain, 0, 0
        self._task = bar.add_task(unit, total=None, step="")
        self._next = time.monotonic() + FIRST_LINE

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` are finished."""
        self._done, self._total = done, total
        self._show(done, "")

    def step(self, step: int, steps: int) -> None:
        """Show that `step` of `steps` of the current one is done."""
        self._show(self._done + step / steps, f"step {step} of {steps}")

    def _show(self, done: float, step: str) -> None:
        self._bar.update(self._task, completed=done, total=self._total, step=step)
        now = time.monotonic()
        if not self._plain or now < self._next:
            return
        self._next = now + 6 * FIRST_LINE
        parts = [f"{self._unit}: {self._done} of {self._total}", *([step] if step else [])]
        if left := self._bar.tasks[0].time_remaining:
            parts.append(f"about {timedelta(seconds=left)} left")
        say(", ".join(parts))


@contextmanager
def progress(unit: str, shown: bool = True) -> Iterator[Bar]:
    """Return a context with a `Bar` that shows progress on stderr.

    `unit` says what is counted, in the plural. If not `shown`, this process shows nothing.
    """
    from rich import progress as rich

    console = _stderr(shown)
    texts = (rich.TextColumn("{task.description}"), rich.TextColumn("{task.fields[step]}"))
    columns = (rich.BarColumn(), rich.MofNCompleteColumn(), *texts, rich.TimeRemainingColumn())
    how = {"console": console, "transient": True, "disable": console.quiet}
    with rich.Progress(*columns, **how, speed_estimate_period=1e6) as bar:
        yield Bar(bar, unit, shown and not (console.is_terminal or OUTPUT.get().quiet))


def doing(what: str, shown: bool = True) -> Any:
    """Return a context in which a terminal shows what is running."""
    return _stderr(shown).status(f"{what} ...")


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
