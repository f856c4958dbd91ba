"""Locks in processes that fork while another thread holds one.

A child process has the forking thread alone: a lock that another thread held at that moment would
never be released in it, and merging could never change there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

Lock = TypeVar("Lock")


def free_in_children(lock: Lock) -> Lock:
    """Return the lock of `threading`, which no other thread holds in a process that is forked.

    A fork doesn't wait for it: threads take several locks, in more than one order.
    """
    own: Any = lock

    def free() -> None:
        if not (hasattr(own, "_is_owned") and own._is_owned()):
            own._at_fork_reinit()  # as the locks of logging and queue do

    in_children(free)
    return lock


def in_children(act: Callable[[], None]) -> None:
    """Call `act` in each process that is forked from this one."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=act)
