"""The edge of the command line: every failure becomes one line on stderr and an exit status.

0 done, 2 bad input (`UserError`, usage), 1 the machine (`MachineError`, memory, a bug), 130 Ctrl-C.
Set MAME_SD_TRACEBACK=1 to see where an error came from.
"""

from __future__ import annotations

import _thread
import contextvars
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mame_sd.cli.console import say
from mame_sd.errors import MachineError, UserError

# Packages that commands need beyond those of a plain installation, and the extra that brings each.
EXTRAS = {
    "matplotlib": "eval",
    "jinja2": "eval",
    "scipy": "eval",
    "torchmetrics": "eval",
    "peft": "lora",
    "tomesd": "rivals",
}
USAGE, MACHINE, INTERRUPTED = 2, 1, 130
_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")


def exit_status(command: Callable[[], object]) -> int:
    """Run `command` and report how it failed, if it did. Returns the exit status."""
    # A file's name need not be UTF-8, and a terminal's encoding need not have every character:
    # stdout writes as escapes what it lacks, as stderr does.
    if getattr(sys.stdout, "errors", None) == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    if os.environ.get("COLUMNS", "").isdigit() and not int(os.environ["COLUMNS"]):
        del os.environ["COLUMNS"]  # no terminal is 0 wide: help would be empty
    with _interrupts() as interrupts:
        try:
            # whatever the command sets for itself ends with it
            status = contextvars.copy_context().run(command)
            if interrupts.lost:
                status = INTERRUPTED
        except KeyboardInterrupt:
            status = INTERRUPTED
        except SystemExit as error:
            status = error.code
        except BaseException as error:
            if os.environ.get("MAME_SD_TRACEBACK"):
                traceback.print_exc()
            if interrupts.came:  # a library that was being imported made another error of it
                status = INTERRUPTED
            else:
                status, message = describe(error)
                say(f"error: {message}")
    if status == INTERRUPTED:
        say("interrupted; finished images are kept, and the same command continues")
    return status if isinstance(status, int) else 0 if status is None else MACHINE


def describe(error: BaseException) -> tuple[int, str]:
    """Exit status of an error and what to say of it."""
    if isinstance(error, UserError):
        return USAGE, str(error)
    if isinstance(error, MachineError):
        return MACHINE, str(error)
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # typer's and click's
        return USAGE, _usage_message(error)
    return MACHINE, _of_the_machine(error)


def _of_the_machine(error: BaseException) -> str:
    """What to say of an error that is not the input's."""
    said = " ".join(str(error).split())[:300] or type(error).__name__
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and any(m in str(error).lower() for m in _MEMORY))
    ):
        return (
            f"there is not enough memory ({said}); lower --batch-size, --height and --width, or use"
            " --dtype float16"
        )
    if isinstance(error, BrokenPipeError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (nothing reads it any more)
        return (
            "the program that was reading the output ended before all of it was written; nothing"
            " else is wrong"
        )
    if isinstance(error, ImportError):
        if extra := EXTRAS.get(error.name or ""):
            return f"expected the package {error.name}, found none; pip install 'mame-sd[{extra}]'"
        return (
            f"a package that mame-sd needs does not load ({said}); install mame-sd again with pip,"
            " in a fresh environment if need be"
        )
    if isinstance(error, OSError):
        return f"a file could not be read or written ({said}); mend that and run the command again"
    return (
        f"unexpected {type(error).__name__}: {said}; this is a bug, MAME_SD_TRACEBACK=1 shows where"
        " it is"
    )


@dataclass
class _Interrupts:
    """Whether Ctrl-C came, and whether the latest one was lost where Python ignores exceptions."""

    came: bool = False
    lost: bool = False


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    """Watch for Ctrl-C during the block, whatever a library makes of its exception; raise it anew
    where a `__del__` or another callback of the interpreter has swallowed it.
    """
    found = _Interrupts()
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield found
        return
    timers: list[threading.Timer] = []

    def note(number: int, frame: Any) -> None:
        found.came, found.lost = True, False
        signal.default_int_handler(number, frame)

    def unraisable(ignored: Any) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            before_hook(ignored)
            return
        found.lost = True
        # The hook's caller ignores what is raised here, too.
        timers.append(threading.Timer(0.05, _interrupt_main_thread))
        timers[-1].start()

    before, before_hook = signal.signal(signal.SIGINT, note), sys.unraisablehook
    sys.unraisablehook = unraisable
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a late one of ours would land here
        for timer in timers:
            timer.cancel()
            timer.join()
        sys.unraisablehook = before_hook
        signal.signal(signal.SIGINT, before)


def _interrupt_main_thread() -> None:
    """Send Ctrl-C to the main thread, so that it also ends a wait (Windows: after the wait)."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        _thread.interrupt_main()


def _usage_message(error: Any) -> str:
    message = error.format_message().strip().rstrip(".?")
    problems = getattr(error.__cause__, "errors", None)  # of a number; typer leaves out what came
    if problems is not None:
        (found,) = problems()
        kind = "a whole number" if found["type"].startswith("int") else "a number"
        message = f"{error.param.opts[0]}: expected {kind}, got {found['input']!r}"
    path = getattr(getattr(error, "ctx", None), "command_path", None) or "mame-sd"
    return f"{message}; {path} --help shows what can be given"
