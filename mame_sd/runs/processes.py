"""Share a run among several processes, which launchers describe in the environment.

``accelerate launch`` and ``torchrun`` do. Only barriers and small objects are exchanged, so gloo
serves every device. Its timeout is 30 days, because processes may have unequal work.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from mame_sd.errors import MachineError, UserError, unexpected

T = TypeVar("T")


@dataclass(frozen=True)
class Process:
    """One process of a run. `local_rank` is its number on this machine.

    Every process must call `wait` and `all_gather`. Both raise MachineError if one has ended.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Return True if this is the first process."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until every process has called this."""
        self.all_gather(None)

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all processes, in order of rank."""
        if self.count == 1:
            return [value]
        import torch.distributed

        values: list[Any] = [None] * self.count
        try:
            torch.distributed.all_gather_object(values, value)
        except RuntimeError as error:
            raise MachineError(
                f"expected {self.count} processes, but one of the others ended early; its own error"
                " says why, and the same command continues the run"
            ) from error
        return values


def check_alone(command: str) -> None:
    """Raise UserError if `command`, whose work can't be shared, runs in several processes."""
    if this_process().count > 1:
        raise UserError(f"{command}: expected one process, got several; start it alone")


def this_process() -> Process:
    """Return this process by RANK, WORLD_SIZE and LOCAL_RANK. Without a launcher it is alone."""
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    values = [os.environ.get(name, default) for name, default in names.items()]
    try:
        return Process(*map(int, values))
    except ValueError:
        got = ", ".join(values)
        raise unexpected(", ".join(names), "whole numbers", got, "unset them") from None


@contextlib.contextmanager
def joined(process: Process) -> Iterator[None]:
    """Take part in the process group while the block runs."""
    if process.count == 1:
        yield
        return
    import torch.distributed

    torch.distributed.init_process_group("gloo", timeout=timedelta(days=30))
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
