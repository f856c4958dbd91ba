"""Trace the library's own functions that a call enters, and the operations that it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import mame_sd

HOME = str(Path(mame_sd.__file__).parent)
# Comprehensions are frames of their own before Python 3.12; PyTorch calls the last at each
# operation.
NOT_OURS = {"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "__torch_function__"}


def traced(run: Callable[[], Any]) -> list[tuple[str, str]]:
    """List (file, function) of every call of our functions and properties in `run()`, in order."""
    trace: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and file.startswith(HOME) and name not in NOT_OURS:
            trace.append((file[len(HOME) + 1 :], frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return trace


def counts(trace: list[tuple[str, str]]) -> tuple[int, int, int]:
    """Return the numbers of files, of calls, and of returns to a file that was left before."""
    files = [file for file, _ in groupby(file for file, _ in trace)]
    return len(set(files)), len(trace), len(files) - len(set(files))


class Operations(TorchDispatchMode):
    """Record the operations of PyTorch that run inside it, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
