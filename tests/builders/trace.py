"""The way of one call through the library's own files, as the interpreter sees it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import mame_sd

HOME = str(Path(mame_sd.__file__).parent)
COMPREHENSIONS = {
    "<genexpr>",
    "<listcomp>",
    "<dictcomp>",
    "<setcomp>",
}  # frames of their own, some only before Python 3.12
NOT_OURS = COMPREHENSIONS | {"__torch_function__"}


@dataclass
class Trace:
    """What one call entered of the library, in order.

    Attributes:
        calls: (file, function) of every call of a function of ours, properties among them;
            comprehensions are none, nor is what PyTorch calls at each operation.
    """

    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def files(self) -> set[str]:
        """The files that were entered."""
        return {file for file, _ in self.calls}

    @property
    def returns(self) -> int:
        """How often a call is in another file than the one before it, and that file was left
        before.
        """
        left: set[str] = set()
        count, now = 0, None
        for file, _ in self.calls:
            if file != now:
                count += file in left
                left.add(file)
                now = file
        return count

    @property
    def counts(self) -> tuple[int, int, int]:
        """Files, calls, returns to a file that was left before."""
        return len(self.files), len(self.calls), self.returns

    def __str__(self) -> str:
        """The counts, and every function by how often it was called."""
        lines = ["{} files, {} calls, {} returns".format(*self.counts)]
        lines += [
            f"{count:4}  {file}: {name}"
            for (file, name), count in Counter(self.calls).most_common()
        ]
        return "\n".join(lines)


def traced(run: Callable[[], Any]) -> Trace:
    """The trace of `run()`."""
    trace = Trace()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and file.startswith(HOME) and name not in NOT_OURS:
            trace.calls.append((file[len(HOME) + 1 :], frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return trace
