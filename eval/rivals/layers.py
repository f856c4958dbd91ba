"""What merging has to beat, on the library's own path: its hooks and layers, with a rival's plan
instead of ours.

So every rival meets the same calls, the same checks and the same counting, and differs in nothing
but what merges. `rival_on` does that for any plan: keys and values (`merge="kv"`), or whole tokens
that it restores ("qkv"). Their plans stand in `plans.py` and `toma.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.fit import fitted_to
from mame_sd.core.keys import Merged, MergeJob
from mame_sd.core.merge import cells_of, plane_of
from mame_sd.diffusion.apply_denoiser import denoiser_of, mame
from mame_sd.diffusion.context import Step, Tokens
from mame_sd.diffusion.handle import MaMeHandle
from mame_sd.diffusion.hook_registry import hook_on
from mame_sd.diffusion.layer import AttentionAdapter, LayerCall, MergeHook, Route


class Run:
    """What the layers of one model share while a rival is on it: the step of the image, and
    generators of random numbers.

    A step is a change of the timestep; they are counted from 0 since it last went against its
    direction.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._step = -1
        self._last: float | None = None
        self._up: bool | None = None  # whether timesteps rise from step to step
        self._timestep: Any = None

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook for the model; it does not wait for a GPU, only who asks for `step`
        does.
        """
        self._timestep = kwargs.get("timestep", args[1] if len(args) > 1 else None)

    def generator(self, device: torch.device) -> torch.Generator:
        """Its generator on `device`."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    @property
    def step(self) -> int:
        """Which one it is; to be asked for at each."""
        if self._timestep is not None:
            now, self._timestep = float(torch.as_tensor(self._timestep).float().max()), None
            up = None if self._last in (None, now) else now > (self._last or 0)
            if self._step < 0 or (
                up is not None and self._up not in (None, up)
            ):  # the first one, or back to the first
                self._step, self._up = 0, None
            elif up is not None:
                self._step, self._up = self._step + 1, up
            self._last = now
        return self._step


# (tokens [B, L, C], their (h, w), what the layers share) -> plan
MakePlan = Callable[[Tensor, tuple[int, int], Run], Any]


class RivalLayer(AttentionAdapter):
    """A layer that merges by a rival's plan and is `inner` in all else."""

    def __init__(self, inner: AttentionAdapter, make: MakePlan, run: Run) -> None:
        super().__init__()
        self.inner, self.make, self.run = inner, make, run

    def call(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> LayerCall:
        """As `inner`."""
        return self.inner.call(module, forward, args, kwargs)

    def route(self, call: LayerCall, known: Tokens | None, config: MaMeConfig) -> Route | str:
        """What `inner` says; a reason where height and width are unknown, or samples that keep
        tokens of their own can't run together.
        """
        route = self.inner.route(call, known, config)
        if isinstance(route, str):
            return route
        if len(route.tokens.size) == 1:
            return "height and width unknown"
        family = getattr(self.inner, "family", None)
        rotary = config.method == "tokens" and family is not None and family.select is not None
        own = getattr(self.make, "own_tokens", False)
        if rotary and own and route.feature is not None and route.feature.shape[0] > 1:
            return (
                "each sample keeps tokens of its own, and their positions are given once for all"
                " samples"
            )
        return route

    def count(self, call: LayerCall, known: Tokens | None) -> int:
        """As `inner`."""
        return self.inner.count(call, known)

    def plan(self, route: Route) -> Any:
        """The rival's."""
        assert route.feature is not None
        return self.make(route.feature, plane_of(route.tokens.size), self.run)

    def job(self, route: Route, name: str, step: Step) -> MergeJob:
        """The rival's keys in place of ours."""
        job = super().job(route, name, step)
        values = {f.name: getattr(job, f.name) for f in fields(job) if f.init}
        return RivalJob(make=self.make, run=self.run, **values)


@dataclass
class RivalJob(MergeJob):
    """One call of a layer whose keys merge by a rival's plan."""

    make: Any = None
    run: Any = None

    def merge(self, call: Mapping[str, Any], bias: bool = True) -> dict[str, Any] | None:
        """See `MergeJob`; nothing is counted, as published, nor fitted unless it is asked for."""
        placed = self.place(call)
        if placed is None:
            return None
        (grid, *_), first = placed
        start, size, _ = grid
        end, parts = start + math.prod(size), []
        plan: Any = None
        for t in (call["key"], call["value"]):
            tokens = t.transpose(1, 2).flatten(2)  # [B, N, H * D]
            image = tokens[:, start:end]
            plan = plan or self.make(image, plane_of(size), self.run)
            kept = torch.cat([tokens[:, :start], plan.merge(image), tokens[:, end:]], 1)
            parts.append(kept.unflatten(2, (t.shape[1], -1)).transpose(1, 2))
        mask = call.get("attn_mask")
        if mask is not None:
            raise ValueError("attn_mask: expected none, a rival's keys have no place in it")
        if self.how.fit_queries:
            drawn = cells_of(size, 0.5, device=image.device).queries
            at = drawn[0 if self.draw is None else int(self.draw)][: self.how.fit_queries] + first
            no_bias = parts[0].new_zeros(1, 1, 1, parts[0].shape[2])
            parts[1] = fitted_to(
                call["query"].index_select(2, at), (call["key"], call["value"]),
                (parts[0], parts[1]), no_bias, None, call.get("scale"),
                (start, parts[0].shape[2] - tokens.shape[1] + end),
            )  # fmt: skip
        self.merged = Merged(parts[0], parts[1], parts[0].new_zeros(0), (plan,))
        return {**call, "key": parts[0], "value": parts[1]}


@contextmanager
def rival_on(
    target: Any,
    make: Callable[[], MakePlan],
    merge: str,
    min_tokens: int = 1024,
    fit_queries: int = 0,
    seed: int = 0,
) -> Iterator[MaMeHandle]:
    """Merging by a rival for a `with` block, in the layers in which ours would merge.

    Args:
        target: what `apply_mame` takes.
        make: called once for each layer, gives what makes its plans.
        merge: "kv" or "qkv".
        min_tokens: layers with fewer are left alone.
        fit_queries: with "kv", how many queries the values of the rival's keys are fitted to.
        seed: of what the rival draws.

    Raises:
        ValueError: nothing could merge.
    """
    run = Run(seed)
    # What merges is the rival's; only which of the two ways is taken is ours.
    keys: dict[str, Any] = {"keep": 0.5, "fit_queries": fit_queries}
    how: dict[str, Any] = keys if merge == "kv" else {"tau": 0.0}
    with mame(target, min_tokens=min_tokens, **how) as handle:
        noted = denoiser_of(target).register_forward_pre_hook(run.note, with_kwargs=True)
        try:
            for module in denoiser_of(target).modules():
                hook = hook_on(module, MergeHook.name)
                if isinstance(hook, MergeHook):
                    hook.layer = RivalLayer(hook.layer, make(), run)
            yield handle
        finally:
            noted.remove()
