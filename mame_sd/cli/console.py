"""What the commands say on a terminal while they work: notes and a progress bar, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LONGEST_LINE = 2000  # characters, of a line that may name a prompt or a cell of any length


@contextmanager
def progress(unit: str, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr with images per second and time left; gives a callback for (done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as bar:
        task = bar.add_task(unit, total=None, rate="")

        def update(done: int, total: int) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            rate = f"{done / elapsed:.2f} {unit}/s" if done and elapsed else ""
            bar.update(task, completed=done, total=total, rate=rate)

        yield update


def say(message: str) -> None:
    """One line on stderr: line ends and control characters in a message (file names, prompts) are escaped, its
    middle is left out where it is long."""
    if len(message) > _LONGEST_LINE:
        message = f"{message[: _LONGEST_LINE // 2]} ... {message[-_LONGEST_LINE // 2 :]}"
    line = " ".join(message.split("\n"))
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
    sys.stdout.flush() if not sys.stdout.closed else None
    encoding = sys.stderr.encoding or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), file=sys.stderr)


def note(text: str) -> None:
    say(f"note: {text}")
