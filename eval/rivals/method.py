"""A rival as a method that a run installs on its model, like merging itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mame_sd.diffusion.handle import MaMeHandle
from mame_sd.errors import UserError
from mame_sd.runs.jobs import Job, generator_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.methods import InstalledMethod, NotApplicable
from mame_sd.runs.sampling import levels_of

from .layers import MakePlan, rival_on


@dataclass(frozen=True)
class Rival:
    """One of `plans.py` or `toma.py`.

    Attributes:
        name: what the run's settings call it.
        make: gives what makes the plans of a layer, from `settings`.
        merge, min_tokens, fit_queries: as in `rival_on`.
    """

    name: str
    make: Callable[..., MakePlan]
    settings: Mapping[str, Any] = field(default_factory=dict)
    merge: str = "kv"
    min_tokens: int = 1024
    fit_queries: int = 0

    def on(self, target: Any, seed: int = 0) -> AbstractContextManager[MaMeHandle]:
        """Merging by this rival for a `with` block; see `rival_on`."""
        make = partial(self.make, **self.settings)
        return rival_on(target, make, self.merge, self.min_tokens, self.fit_queries, seed)

    def describe(self) -> dict[str, Any]:
        about = {"name": self.name, "merge": self.merge, "min_tokens": self.min_tokens}
        if self.fit_queries:
            about["fit_queries"] = self.fit_queries
        return {"rival": {**about, **self.settings}}

    def install(self, model: LoadedModel) -> InstalledMethod:
        """Raises NotApplicable for a model in which nothing can merge."""
        return _Installed(self, model)


class _Installed:
    """A rival on a model, put on anew for each batch: what it drew or kept for one never meets
    another.
    """

    def __init__(self, rival: Rival, model: LoadedModel) -> None:
        self._rival, self._model = rival, model
        self._on = ExitStack()
        self._handle = self._enter(0)

    def _enter(self, seed: int) -> MaMeHandle:
        try:
            return self._on.enter_context(self._rival.on(self._model.pipe, seed))
        except (TypeError, ValueError) as error:
            raise NotApplicable(f"{self._rival.name}: {error}") from error

    def begin(self, jobs: Sequence[Job]) -> None:
        self._on.close()
        # Not the image's own seed, from which its noise is drawn.
        digest = hashlib.sha256(f"rival/{generator_of(jobs[0]).initial_seed()}".encode()).digest()
        self._handle = self._enter(int.from_bytes(digest[:7], "big"))

    def levels(self) -> list[dict[str, Any]]:
        """Raises NotApplicable when nothing could merge."""
        try:
            return levels_of(self._handle)
        except UserError as error:
            raise NotApplicable(f"{self._rival.name}: {error}") from error

    def remove(self) -> None:
        self._on.close()
