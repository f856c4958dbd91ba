"""Run rivals in the library's own hooks and layers, and install them as merging is installed.

A layer takes a rival's plan instead of ours. So every rival gets the same calls, the same checks
and the same counting, and differs only in what merges.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.cells import plane_of
from mame_sd.core.intercept import MergeJob
from mame_sd.core.merge_keys import Grid, Merged
from mame_sd.diffusion.apply_denoiser import apply_mame
from mame_sd.diffusion.context import Step, Tokens
from mame_sd.diffusion.denoisers import denoiser_of
from mame_sd.diffusion.handle import MaMeHandle
from mame_sd.diffusion.hook_registry import hook_on
from mame_sd.diffusion.layer import (
    AttentionAdapter,
    LayerCall,
    MergeHook,
    MergeKeys,
    MergeTokens,
    Route,
    Skip,
)
from mame_sd.errors import UserError
from mame_sd.runs.jobs import Job, generator_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.merging import InstalledMerging, InstalledMethod, NotApplicable

MakePlan = Callable[[Tensor, tuple[int, ...]], Any]  # of tokens [B, L, C] and their size


class RivalLayer(AttentionAdapter):
    """A layer that merges by a rival's plan and otherwise works like `inner`.

    If `frames`, `make` takes the (frames, rows, columns) of a video, otherwise those of a plane.
    """

    def __init__(self, inner: AttentionAdapter, make: MakePlan, frames: bool = False) -> None:
        super().__init__()
        self.inner, self.frames = inner, frames
        self.make = make if frames else lambda x, size: make(x, plane_of(size))

    def call(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> LayerCall:
        """Describe a call as `inner` does."""
        return self.inner.call(module, forward, args, kwargs)

    def route(self, call: LayerCall, layout: Tokens | None, config: MaMeConfig) -> Route:
        """Decide how a call merges as `inner` does; refuse sizes that the plan can't use."""
        route = self.inner.route(call, layout, config)
        if isinstance(route, Skip):
            return route
        if len(route.tokens.size) == 1:
            return Skip("height and width unknown")
        if self.frames and len(route.tokens.size) != 3:
            return Skip("no frames")
        return route

    def with_merged_tokens(self, route: MergeTokens, plan: Any) -> Any:
        """Compute merged tokens as `inner` does."""
        return self.inner.with_merged_tokens(route, plan)

    def count(self, call: LayerCall, layout: Tokens | None) -> int:
        """Count the image's tokens as `inner` does."""
        return self.inner.count(call, layout)

    def plan(self, route: MergeTokens) -> Any:
        """Return the rival's plan."""
        return self.make(route.feature, route.tokens.size)

    def job(self, route: MergeKeys, name: str, step: Step) -> MergeJob:
        """Return a job that merges the rival's keys instead of ours."""
        job = super().job(route, name, step)
        values = {f.name: getattr(job, f.name) for f in fields(job) if f.init}
        return RivalJob(make=self.make, **values)


@dataclass
class RivalJob(MergeJob):
    """One call of a layer whose keys merge by a rival's plan."""

    make: Any = None

    def merge(
        self, call: Mapping[str, Any], grids: list[Grid], first: int, bias: bool = True
    ) -> dict[str, Any] | None:
        """Merge keys and values, see `MergeJob`.

        As published, sizes aren't counted and values aren't fitted.
        """
        start, size, _ = grids[0]
        end, parts = start + math.prod(size), []
        plan: Any = None
        for t in (call["key"], call["value"]):
            tokens = t.transpose(1, 2).flatten(2)  # [B, N, H * D]
            image = tokens[:, start:end]
            plan = plan or self.make(image, size)
            kept = torch.cat([tokens[:, :start], plan.merge(image), tokens[:, end:]], 1)
            parts.append(kept.unflatten(2, (t.shape[1], -1)).transpose(1, 2))
        mask = call.get("attn_mask")
        if mask is not None:
            raise ValueError("attn_mask: expected none, a rival's keys have no place in it")
        self.merged = Merged(parts[0], parts[1], parts[0].new_zeros(0), (plan,))
        return {**call, "key": parts[0], "value": parts[1]}


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
        frames: True for a plan of videos alone, see `RivalLayer`.
    """

    name: str
    make: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    merge: str = "kv"
    min_tokens: int = 1024
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
        keys: dict[str, Any] = {"keep": 0.5, "fit_queries": 0}
        how: dict[str, Any] = keys if self.merge == "kv" else {"tau": 0.0}

        def maker() -> Callable[..., Any]:
            if isinstance(self.make, type):
                return partial(self.make(**self.settings), draw=draw)
            return partial(self.make, draw=draw, **self.settings)

        with apply_mame(target, min_tokens=self.min_tokens, **how) as handle:
            for module in denoiser_of(target).modules():
                hook = hook_on(module, MergeHook.name)
                if isinstance(hook, MergeHook):
                    hook.layer = RivalLayer(hook.layer, maker(), self.frames)
            yield handle

    def describe(self) -> dict[str, Any]:
        """Return its settings as JSON values."""
        about = {"name": self.name, "merge": self.merge, "min_tokens": self.min_tokens}
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
