"""Watch the calls of a tiny model's attention: those of layers that merge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mame_sd.core.groups import Groups
from mame_sd.core.intercept import MergeJob
from mame_sd.core.merge_keys import Grid
from mame_sd.diffusion.layer import LayerStats
from tests.oracle import Image, merged_attention


class NoAttention(TorchFunctionMode):
    """Give zeros for all softmax attention while entered."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        call = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        query, value = call["query"], call["value"]
        return query.new_zeros(*query.shape[:-1], value.shape[-1])


class Merged(NamedTuple):
    """One call whose keys merge: its arguments, and those that the kernel is given instead.

    The generated image's group comes first, and its keys begin at `first`. `counted` says whether
    the kernel was given the sizes of groups.
    """

    call: dict[str, Any]
    changed: dict[str, Any]
    job: MergeJob
    groups: tuple[Groups, ...]
    first: int
    counted: bool

    @property
    def tokens(self) -> int:
        """How many tokens the generated image has."""
        return self.groups[0].tokens_in

    @property
    def output(self) -> Tensor:
        """What the kernel gives."""
        names = ("query", "key", "value", "attn_mask", "scale")
        given = {name: self.changed[name] for name in names if name in self.changed}
        shared = self.call["query"].shape[1] != self.call["key"].shape[1]
        return F.scaled_dot_product_attention(**given, enable_gqa=shared)


@contextmanager
def merging() -> Iterator[list[Merged]]:
    """All calls whose keys merge while the block runs, in order."""
    found: list[Merged] = []
    merge = MergeJob.merge

    def noted(
        self: MergeJob, call: Mapping[str, Any], grids: list[Grid], first: int, bias: bool = True
    ) -> dict[str, Any] | None:
        changed = merge(self, call, grids, first, bias)
        if changed is not None:
            assert self.merged is not None
            groups, start = self.merged.groups, grids[0].start
            found.append(Merged(dict(call), dict(changed), self, groups, start, bias))
        return changed

    with mock.patch.object(MergeJob, "merge", noted):
        yield found


@contextmanager
def latest_plans() -> Iterator[dict[str, Any]]:
    """By name of a layer the plan of its latest call in the block that merged."""
    plans: dict[str, Any] = {}
    count = LayerStats.merged

    def merged(self: LayerStats, found: Any, size: tuple[int, ...], note: str = "") -> None:
        plans[self.name] = found[0]
        count(self, found, size, note)

    with mock.patch.object(LayerStats, "merged", merged):
        yield plans


def by_loop(merged: Merged) -> tuple[Tensor, Tensor]:
    """Compute the output and the values of a call in float64, token by token, from its groups."""
    call, job = merged.call, merged.job
    shift = merged.first - job.grids[0].start
    images = [
        Image(grid.start + shift, groups.groups.tolist(), groups.kept.tolist())
        for grid, groups in zip(job.grids, merged.groups, strict=True)
    ]
    query, key = call["query"], call["key"]
    count = job.options.fit_queries
    if count is None:
        count = min(max(merged.tokens // 32, 64), 256)
    number = 0 if job.draw is None else int(job.draw)
    shared = query.shape[1] // key.shape[1]
    spread = merged.groups[0].cells.queries[number]
    if query.shape[2] == key.shape[2]:
        spread = spread + merged.first
    elif query.shape[2] == job.length:
        spread = spread + job.grids[0].start
    elif query.shape[2] != merged.tokens:
        spread = spread + job.first_query
    queries = spread[: max(1, count // shared)]
    start = int((spread - merged.groups[0].cells.queries[number])[0])
    image = range(start, start + merged.tokens)
    beside = [at for at in range(query.shape[2]) if at not in image]
    scale = job.scale if job.scale is not None else call.get("scale")
    output, values = merged_attention(
        query, key, call["value"], images, queries.tolist() if count else (),
        call.get("attn_mask"), scale, () if merged.counted else (spread.tolist(), beside),
    )  # fmt: skip
    return output.to(query.dtype), values.to(query.dtype)


def check_by_loop(merged: Merged) -> None:
    """Check that the kernel is given the loop's values, and gives the loop's output."""
    output, values = by_loop(merged)
    # The direction that carries sizes is solved for in fp32, to three digits.
    far = 1 if merged.counted else 50
    torch.testing.assert_close(merged.changed["value"], values, rtol=far * 1e-3, atol=far * 1e-4)
    torch.testing.assert_close(merged.output, output, rtol=far * 1e-4, atol=far * 1e-5)
