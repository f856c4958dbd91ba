"""Turn every failure of a command into one line on stderr and an exit status.

0 done, 2 wrong input (`UserError`, usage), 1 the machine (`MachineError`, memory, a bug), 130
Ctrl-C. MAME_SD_TRACEBACK=1 shows where an error came from.
"""

from __future__ import annotations

import contextvars
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from mame_sd.cli.console import say
from mame_sd.errors import MachineError, UserError

# Packages that a plain installation lacks, with the extra that brings each.
EXTRAS = {
    "matplotlib": "eval",
    "jinja2": "eval",
    "scipy": "eval",
    "torchmetrics": "eval",
    "peft": "lora",
    "tomesd": "rivals",
}
USAGE, MACHINE, INTERRUPTED = 2, 1, 130
STOPPED = "interrupted; finished images are kept, and the same command continues"
_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")


def exit_status(command: Callable[[], object]) -> int:
    """Run `command`, report its failure if there is one, and return the exit status."""
    # Names of files and terminals have encodings of their own; write what they lack as escapes.
    if getattr(sys.stdout, "errors", None) == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    if os.environ.get("COLUMNS") == "0":  # help would be empty
        del os.environ["COLUMNS"]
    try:
        # Context variables that the command sets end with it.
        status = contextvars.copy_context().run(command)
    except SystemExit as error:
        status = error.code
    except BaseException as error:
        if os.environ.get("MAME_SD_TRACEBACK"):
            traceback.print_exc()
        if _interrupted(error):
            status = INTERRUPTED
        else:
            status, message = describe(error)
            say(f"error: {message}")
    if status == INTERRUPTED:
        say(STOPPED)
    return status if isinstance(status, int) else 0 if status is None else MACHINE


def describe(error: BaseException) -> tuple[int, str]:
    """Return the exit status of an error and its message."""
    if isinstance(error, UserError):
        return USAGE, str(error)
    if isinstance(error, MachineError):
        return MACHINE, str(error)
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # typer's and click's
        return USAGE, _usage_message(error)
    return MACHINE, _of_the_machine(error)


def _of_the_machine(error: BaseException) -> str:
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
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (nobody reads it any more)
        return "the program that reads the output ended before all was written; nothing else failed"
    if isinstance(error, ImportError):
        if extra := EXTRAS.get(error.name or ""):
            return f"expected the package {error.name}, found none; pip install 'mame-sd[{extra}]'"
        return (
            f"a package that mame-sd needs does not load ({said}); install mame-sd again with pip,"
            " in a fresh environment if need be"
        )
    if isinstance(error, OSError):
        return f"a file could not be read or written ({said}); correct that and run it again"
    return (
        f"unexpected {type(error).__name__}: {said}; this is a bug, MAME_SD_TRACEBACK=1 shows where"
    )


def _interrupted(error: BaseException | None) -> bool:
    """Return True if Ctrl-C caused an error, also one that a library made of it at its import."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _usage_message(error: Any) -> str:
    message = error.format_message().strip().rstrip(".?")
    problems = getattr(error.__cause__, "errors", None)  # of a number; typer omits what came
    if problems is not None:
        (problem,) = problems()
        kind = "a whole number" if problem["type"].startswith("int") else "a number"
        message = f"{error.param.opts[0]}: expected {kind}, got {problem['input']!r}"
    path = getattr(getattr(error, "ctx", None), "command_path", None) or "mame-sd"
    return f"{message}; {path} --help shows what can be given"
