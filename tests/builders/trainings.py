"""Smoke runs of the commands in `scripts.training`, in this process: another would load all
libraries again.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch


class StoppedError(Exception):
    """Stands for a person who stops a training."""


def smoke(command: ModuleType, work: Path, *options: str) -> None:
    """What `python -m COMMAND --smoke --work WORK OPTIONS` does."""
    words = [command.__name__, "--smoke", "--work", str(work), *options]
    threads, exact = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", words)
        try:
            command.main()
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(exact)


def stopped(command: ModuleType, work: Path, stage: str) -> None:
    """A smoke run that is stopped where the training of `stage` begins."""
    train = command.train_stage

    def stop(place: Path, at: object, *rest: object) -> object:
        if getattr(at, "name", None) == stage:
            raise StoppedError
        return train(place, at, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "train_stage", stop)
        with pytest.raises(StoppedError):
            smoke(command, work)
