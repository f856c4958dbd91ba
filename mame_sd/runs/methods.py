"""The method of a run: merging, or another one that is installed on the loaded model and removed
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.jobs import Job
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.sampling import levels_of, merge_in

if TYPE_CHECKING:
    from mame_sd.diffusion.handle import MaMeHandle


class NotApplicable(UserError):
    """The method can do nothing with this model."""


class InstalledMethod(Protocol):
    """A method on one model."""

    def begin(self, jobs: Sequence[Job]) -> None:
        """Called before each batch: sets counters to zero, and any random state to one that depends
        on `jobs` alone.
        """

    def levels(self) -> list[dict[str, Any]]:
        """Tokens in and kept per level since `begin` (fields of LevelReport).

        Raises UserError when nothing could merge.
        """

    def remove(self) -> None:
        """Leave the model as it was."""


class Method(Protocol):
    """A method with its settings."""

    def describe(self) -> dict[str, Any]:
        """What the run's settings say of it, as JSON values."""

    def install(self, model: LoadedModel) -> InstalledMethod:
        """Put it on the model. Raises UserError for a model that it does not support."""


@dataclass(frozen=True)
class Merging:
    """Merging with `config`."""

    config: MaMeConfig

    def describe(self) -> dict[str, Any]:
        return {"mame": self.config.to_dict()}

    def on(self, model: LoadedModel) -> Merging:
        """As it merges on the model."""
        return Merging(model.resolved(self.config))

    def install(self, model: LoadedModel) -> InstalledMethod:
        return _InstalledMerging(merge_in(model, self.config))


@dataclass(frozen=True)
class _InstalledMerging:
    handle: MaMeHandle

    def begin(self, jobs: Sequence[Job]) -> None:
        self.handle.reset()

    def levels(self) -> list[dict[str, Any]]:
        return levels_of(self.handle)

    def remove(self) -> None:
        self.handle.remove()
