"""Define methods of a run: the protocols that they implement, and merging."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mame_sd.config import NAMES, MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.jobs import Job

if TYPE_CHECKING:  # both import torch, which names of methods can do without
    from mame_sd.diffusion.handle import MaMeHandle
    from mame_sd.runs.loading import LoadedModel


def settings_of(text: str, flag: str) -> MaMeConfig:
    """Return settings given as `name=value,...`, or as the path of a .json file.

    Raises:
        UserError: the text or the file holds other things. The message names the `flag`.
    """
    if "=" in text and not os.path.exists(text):
        try:
            return MaMeConfig.from_text(text)
        except ValueError as error:
            raise UserError(f"{flag} {text}: {error}; correct it") from None
    try:
        return MaMeConfig.from_file(Path(text))
    except ValueError as error:
        raise UserError(f"{flag} {error}") from None


class NotApplicable(UserError):
    """The method, or one of its settings, can do nothing with this model."""


class InstalledMethod(Protocol):
    """A method on one model."""

    def begin(self, jobs: Sequence[Job]) -> None:
        """Prepare for a batch: reset counters, and derive any random state from `jobs` alone."""

    def levels(self) -> list[dict[str, Any]]:
        """Return the tokens of each level since `begin`, as fields of LevelReport.

        Raises:
            UserError: nothing could merge.
        """

    def remove(self) -> None:
        """Leave the model as it was."""


class Method(Protocol):
    """A method with its settings."""

    def describe(self) -> dict[str, Any]:
        """Return its part of the run's settings, as JSON values."""

    def install(self, model: LoadedModel) -> InstalledMethod:
        """Install it on a model, or raise UserError if it doesn't support the model."""


@dataclass(frozen=True)
class Merging:
    """Merging with `config`."""

    config: MaMeConfig

    def describe(self) -> dict[str, Any]:
        """Return its part of the run's settings, with the numbers of the default."""
        values = {**self.config.to_dict(), "keep": self.config.keep}
        if self.config.mlp_share < 1:
            values["mlp_keep"] = self.config.mlp_share
        return {"mame": values}

    def on(self, model: LoadedModel) -> Merging:
        """Return it with the settings that it takes on a model."""
        return Merging(model.resolved(self.config))

    def install(self, model: LoadedModel) -> InstalledMerging:
        """Install it on a model, or raise UserError if merging doesn't support the model."""
        from mame_sd.diffusion.apply_denoiser import apply_mame

        try:
            return InstalledMerging(apply_mame(model.pipe, self.config))
        except (TypeError, ValueError) as error:
            if str(error).partition(":")[0] in NAMES:  # a setting is wrong for this model
                raise NotApplicable(f"merging: {error}") from error
            raise UserError(
                f"--model {model.identity['name']}: {error}; choose another model, or --baseline"
            ) from error


@dataclass(frozen=True)
class InstalledMerging:
    """Merging on one model."""

    handle: MaMeHandle

    def begin(self, jobs: Sequence[Job]) -> None:
        """Reset the counters."""
        self.handle.reset()

    def levels(self) -> list[dict[str, Any]]:
        """Return the tokens of each level, or raise UserError if nothing could merge."""
        from mame_sd.report import NothingMergedError

        try:
            return [asdict(level) for level in self.handle.report().levels()]
        except NothingMergedError as error:
            raise UserError(
                f"{' '.join(str(error).split())} (see --min-tokens, --height and --width,"
                " --baseline)"
            ) from None

    def remove(self) -> None:
        """Leave the model as it was."""
        self.handle.remove()
