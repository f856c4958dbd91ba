"""Run rivals in the library's own hooks and layers, with a rival's plan instead of ours.

So every rival gets the same calls, the same checks and the same counting, and differs only in what
merges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.core.cells import plane_of
from mame_sd.core.fit import fit_values
from mame_sd.core.groups import make_cells
from mame_sd.core.intercept import MergeJob
from mame_sd.core.merge_keys import Grid, Merged
from mame_sd.diffusion.context import Step, Tokens
from mame_sd.diffusion.layer import AttentionAdapter, LayerCall, Route

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

    def route(self, call: LayerCall, layout: Tokens | None, config: MaMeConfig) -> Route | str:
        """Decide how a call merges as `inner` does; refuse sizes that the plan can't use."""
        route = self.inner.route(call, layout, config)
        if not isinstance(route, str) and len(route.tokens.size) == 1:
            return "height and width unknown"
        if self.frames and not isinstance(route, str) and len(route.tokens.size) != 3:
            return "no frames"
        return route

    def count(self, call: LayerCall, layout: Tokens | None) -> int:
        """Count the image's tokens as `inner` does."""
        return self.inner.count(call, layout)

    def plan(self, route: Route) -> Any:
        """Return the rival's plan."""
        assert route.feature is not None
        return self.make(route.feature, route.tokens.size)

    def job(self, route: Route, name: str, step: Step) -> MergeJob:
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

        As published, sizes aren't counted and values aren't fitted, unless the rival asks for it.
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
        if self.options.fit_queries:
            drawn = make_cells(size, 0.5, device=image.device).queries
            at = (
                drawn[0 if self.draw is None else int(self.draw)][: self.options.fit_queries]
                + first
            )
            no_bias = parts[0].new_zeros(1, 1, 1, parts[0].shape[2])
            parts[1] = fit_values(
                call["query"].index_select(2, at), (call["key"], call["value"]),
                (parts[0], parts[1]), no_bias, None, call.get("scale"),
                (start, parts[0].shape[2] - tokens.shape[1] + end),
            )  # fmt: skip
        self.merged = Merged(parts[0], parts[1], parts[0].new_zeros(0), (plan,))
        return {**call, "key": parts[0], "value": parts[1]}
