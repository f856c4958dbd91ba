"""Kill a run of `generate` with SIGKILL at a chosen moment, to the system call.

A run is a forked child. Its n-th file operation below the run folder (open for writing, rename,
mkdir, unlink) is preceded by SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}


def kill_at(number: int, folder: Path) -> None:
    """From now on, SIGKILL this process just before its `number`-th operation that changes
    something in `folder`.
    """
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in EVENTS or not str(arguments[0]).startswith(str(folder)):
            return
        if event == "open" and not (
            isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        ):
            return
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def in_child(run: Callable[[], object]) -> int:
    """Run in a forked child; returns its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            run()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def snapshot(folder: Path) -> dict[str, str]:
    """Every file below `folder` as hex, samples.jsonl without its seconds."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if path.name == "samples.jsonl":
            rows = [json.loads(line) for line in data.decode().splitlines()]
            assert all(row.pop("seconds") > 0 for row in rows)
            data = json.dumps(rows).encode()
        found[path.relative_to(folder).as_posix()] = data.hex()
    return found
