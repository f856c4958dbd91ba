"""Install a rival on a run's model, as merging is installed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mame_sd.diffusion.apply_denoiser import apply_mame, hooks_restored
from mame_sd.diffusion.denoisers import denoiser_of
from mame_sd.diffusion.handle import MaMeHandle
from mame_sd.diffusion.hook_registry import hook_on
from mame_sd.diffusion.layer import MergeHook
from mame_sd.errors import UserError
from mame_sd.runs.jobs import Job, generator_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.merging import InstalledMerging, InstalledMethod, NotApplicable

from .layers import RivalLayer


@dataclass(frozen=True)
class Rival:
    """A way to merge keys and values, or tokens, in the layers in which ours would merge.

    Attributes:
        name: name in the run's settings.
        make: a function of `plans.py` that takes `settings`, or a class such as `ToMA`, of which
            each layer has an object of its own, made with `settings`.
        settings: keyword arguments of `make`.
        merge: "kv", or "qkv" for tokens that it restores after attention.
        min_tokens: layers with fewer tokens are not merged.
        fit_queries: with "kv", number of queries to which the values of the rival's keys are
            fitted.
        frames: True for a plan of videos alone, see `RivalLayer`.
    """

    name: str
    make: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    merge: str = "kv"
    min_tokens: int = 1024
    fit_queries: int = 0
    frames: bool = False

    @contextmanager
    def on(self, target: Any, seed: int = 0) -> Iterator[MaMeHandle]:
        """Merge by this rival for a `with` block.

        Args:
            target: what `apply_mame` takes.
            seed: seed of what the rival draws.

        Raises:
            ValueError: nothing could merge.
        """
        generators: dict[torch.device, torch.Generator] = {}

        def draw(count: int, device: torch.device) -> Tensor:
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            return torch.rand(count, generator=generators[device], device=device)

        # What merges is the rival's; only which of the two ways is taken is ours.
        keys: dict[str, Any] = {"keep": 0.5, "fit_queries": self.fit_queries}
        how: dict[str, Any] = keys if self.merge == "kv" else {"tau": 0.0}

        def maker() -> Callable[..., Any]:
            if isinstance(self.make, type):
                return partial(self.make(**self.settings), draw=draw)
            return partial(self.make, draw=draw, **self.settings)

        with hooks_restored(target):
            handle = apply_mame(target, min_tokens=self.min_tokens, **how)
            for module in denoiser_of(target).modules():
                hook = hook_on(module, MergeHook.name)
                if isinstance(hook, MergeHook):
                    hook.layer = RivalLayer(hook.layer, maker(), self.frames)
            yield handle

    def describe(self) -> dict[str, Any]:
        """Return its settings as JSON values."""
        about = {"name": self.name, "merge": self.merge, "min_tokens": self.min_tokens}
        if self.fit_queries:
            about["fit_queries"] = self.fit_queries
        return {"rival": {**about, **self.settings}}

    def install(self, model: LoadedModel) -> InstalledMethod:
        """Put it on a model. Raise NotApplicable if nothing can merge in it."""
        return _Installed(self, model)


class _Installed:
    """A rival on a model, installed anew for each batch, so that batches share no drawn numbers."""

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
        """Install it anew, with a seed from the batch's jobs."""
        self._on.close()
        # Not the image's own seed, from which its noise is drawn.
        digest = hashlib.sha256(f"rival/{generator_of(jobs[0]).initial_seed()}".encode()).digest()
        self._handle = self._enter(int.from_bytes(digest[:7], "big"))

    def levels(self) -> list[dict[str, Any]]:
        """Return the levels that merged. Raise NotApplicable if nothing could merge."""
        try:
            return InstalledMerging(self._handle).levels()
        except UserError as error:
            raise NotApplicable(f"{self._rival.name}: {error}") from error

    def remove(self) -> None:
        """Take it off the model."""
        self._on.close()
