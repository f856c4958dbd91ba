"""Threads, and processes that are forked from this one, which has loaded all libraries."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 300
EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}


def in_thread(work: Callable[[], None]) -> None:
    """Do the work in another thread, and wait for its end."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def kill_at(number: int, folder: Path) -> None:
    """SIGKILL this process just before its `number`-th operation that changes `folder`."""
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


def in_two_processes(run: Callable[[], int], folder: Path) -> str:
    """Call `run` in two processes as a launcher does; return what both wrote to stdout."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=_run, args=(run, rank, port, folder)) for rank in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
    out, err = (
        "".join((folder / f"{rank}.{name}").read_text(encoding="utf-8") for rank in range(2))
        for name in ("out", "err")
    )
    assert [process.exitcode for process in started] == [0, 0], err
    return out


def _run(run: Callable[[], int], rank: int, port: int, folder: Path) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with (
        open(folder / f"{rank}.out", "w", encoding="utf-8") as out,
        open(folder / f"{rank}.err", "w", encoding="utf-8") as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = run()
    sys.exit(status)
