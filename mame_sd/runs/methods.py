"""The method of a run: merging, or another one that is installed on the loaded model and removed
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mame_sd.config import NAMES, MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.jobs import Job

if TYPE_CHECKING:  # both import torch, which names of methods can do without
    from mame_sd.diffusion.handle import MaMeHandle
    from mame_sd.runs.loading import LoadedModel


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
        values = {**self.config.to_dict(), "keep": self.config.keep}  # the default's numbers, too
        if self.config.mlp_share < 1:
            values["mlp_keep"] = self.config.mlp_share
        return {"mame": values}

    def on(self, model: LoadedModel) -> Merging:
        """As it merges on the model."""
        return Merging(model.resolved(self.config))

    def install(self, model: LoadedModel) -> InstalledMerging:
        """Raises UserError for a model that merging does not support."""
        from mame_sd.diffusion.apply_denoiser import apply_mame

        try:
            return InstalledMerging(apply_mame(model.pipe, self.config))
        except (TypeError, ValueError) as error:
            if str(error).partition(":")[0] in NAMES:  # a setting is wrong for this model
                raise UserError(f"merging: {error}") from error
            raise UserError(
                f"--model {model.identity['name']}: {error}; choose another model, or --baseline"
            ) from error


@dataclass(frozen=True)
class InstalledMerging:
    """Merging on one model."""

    handle: MaMeHandle

    def begin(self, jobs: Sequence[Job]) -> None:
        self.handle.reset()

    def levels(self) -> list[dict[str, Any]]:
        """Raises UserError when nothing could merge."""
        from mame_sd.report import NothingMergedError

        try:
            return [asdict(level) for level in self.handle.report().levels()]
        except NothingMergedError as error:
            raise UserError(
                " ".join(str(error).split())
                + " (see --min-tokens, --height and --width, --baseline)"
            ) from None

    def remove(self) -> None:
        self.handle.remove()
