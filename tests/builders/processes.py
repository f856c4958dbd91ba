"""Two processes of one run with the environment that a launcher gives them. They are forked from
this one, for a fresh one first loads all libraries.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

SECONDS = 300


def in_two_processes(run: Callable[[], int], folder: Path) -> str:
    """Calls `run`, which returns an exit status, in each; gives what they wrote to stdout.

    Raises:
        AssertionError: one of them failed, or did not end; with what they wrote to stderr.
    """
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
