"""Release locks in forked processes.

A child process has only the thread that forked. A lock that another thread held at that moment
would never be released in the child, and merging could not change there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

Lock = TypeVar("Lock")


def free_in_children(lock: Lock) -> Lock:
    """Return a lock of `threading`, and release it in forked processes if another thread holds it.

    The fork doesn't wait for the lock, because threads take several locks in more than one order.
    """
    any_lock: Any = lock

    def free() -> None:
        if not (hasattr(any_lock, "_is_owned") and any_lock._is_owned()):
            any_lock._at_fork_reinit()  # as the locks of logging and queue do

    in_children(free)
    return lock


def in_children(act: Callable[[], None]) -> None:
    """Call `act` in each process that will be forked from this one."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=act)
