"""Several processes sharing one run: who this process is, and a way to wait for the others.

Launchers (``accelerate launch``, ``torchrun``) say so in the environment. Nothing but barriers and small objects is exchanged,
so gloo serves on every device, and it never times out on shards of uneven length.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from mame_sd.errors import MachineError, UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """This process among those of the run: `rank` of `count`; `local_rank` counts on this machine."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Return when every process has come here. Raises MachineError when one of them is gone."""
        if self.count > 1:
            import torch.distributed

            with self._together():
                torch.distributed.barrier()

    def gather(self, part: T) -> list[T]:
        """On the main process the `part` of every process, in order of rank; on the others nothing.

        Raises MachineError when one of them is gone.
        """
        if self.count == 1:
            return [part]
        import torch.distributed

        parts: list[Any] | None = [None] * self.count if self.is_main else None
        with self._together():
            torch.distributed.gather_object(part, parts)
        return parts or []

    def everywhere(self, part: T) -> list[T]:
        """The `part` of every process, in order of rank, on all of them. Raises MachineError when one of them is gone."""
        if self.count == 1:
            return [part]
        import torch.distributed

        parts: list[Any] = [None] * self.count
        with self._together():
            torch.distributed.all_gather_object(parts, part)
        return parts

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise MachineError(
                f"expected {self.count} processes, but another one ended early; its own error says why, "
                "and the same command continues"
            ) from error


def shard_of_environment() -> Shard:
    """What the launcher says; a lone process when there was none. Raises UserError for numbers that are none."""
    values = [
        os.environ.get(name, str(default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    ]
    try:
        rank, count, local_rank = (int(value) for value in values)
    except ValueError:
        raise UserError(
            f"expected whole numbers in RANK, WORLD_SIZE and LOCAL_RANK, got {', '.join(values)}; unset them"
        ) from None
    return Shard(rank, count, local_rank)


@contextlib.contextmanager
def joined(shard: Shard) -> Iterator[None]:
    """Take part in the process group while the block runs."""
    if shard.count == 1:
        yield
        return
    import torch.distributed

    torch.distributed.init_process_group("gloo", timeout=timedelta(days=30))
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
