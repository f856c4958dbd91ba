"""What a tiny model's attention is called with: all keys, or those of layers that merge and where
their image is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mame_sd.core.plan import Plan
from mame_sd.diffusion.families.keys import MergedKeys


class Attention(TorchFunctionMode):
    """While entered, notes the keys of all softmax attention, and how long each other softmax is.

    With `apart` attention gives zeros, so that no token learns of others.
    """

    def __init__(self, apart: bool = False) -> None:
        super().__init__()
        self.apart = apart
        self.keys: list[Tensor] = []
        self.written: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.softmax, F.softmax, Tensor.softmax):  # attention written out
            self.written.add(args[0].shape[-1])
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = (
            kwargs.get(name, args[i] if len(args) > i else None)
            for i, name in enumerate(("query", "key", "value"))
        )
        self.keys.append(key)
        return (
            query.new_zeros(*query.shape[:-1], value.shape[-1])
            if self.apart
            else func(*args, **kwargs)
        )


class Merged(NamedTuple):
    """One call whose keys merge.

    Attributes:
        call: its arguments, with all keys.
        plan: of the image's tokens.
        first: where the image's keys begin.
        place: where the plan's tokens are among the image's.
        output: what came out.
    """

    call: dict[str, Any]
    plan: Plan
    first: int
    place: Callable[[Tensor], Tensor]
    output: Tensor


@contextmanager
def merging() -> Iterator[list[Merged]]:
    """All calls whose keys merge while the block runs, in order."""
    found: list[Merged] = []
    attend = MergedKeys.attend

    def noted(self: MergedKeys, attention: Any, call: dict[str, Any]) -> Tensor:
        self.seen = False
        output = attend(self, attention, dict(call))
        if self.seen:
            found.append(Merged(call, self.plan, self.first, self.tokens.places, output))
        return output

    MergedKeys.attend = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        MergedKeys.attend = attend  # type: ignore[method-assign]


def by_loop(merged: Merged) -> Tensor:
    """The output of such a call in float64, token by token.

    Where other tokens stay beside the image's, each group's mean counts once for each of its
    tokens.
    """
    call, plan, first = merged.call, merged.plan, merged.first
    query, key, value = (call[name].double() for name in ("query", "key", "value"))
    at = merged.place(torch.arange(plan.tokens_in)) + first
    kept = merged.place(plan.kept) + first
    mask = call.get("attn_mask")
    scale = call.get("scale") or query.shape[-1] ** -0.5
    outputs = []
    for i in range(query.shape[0]):
        sums = [t[i].new_zeros(t.shape[1], plan.tokens_kept, t.shape[3]) for t in (key, value)]
        sizes = query.new_zeros(plan.tokens_kept)
        for token, row in zip(at.tolist(), plan.rows[i].tolist(), strict=True):
            sizes[row] += 1
            for total, t in zip(sums, (key, value), strict=True):
                total[:, row] += t[i, :, token]
        last = first + plan.tokens_in
        parts = [
            torch.cat([t[i, :, :first], total / sizes[:, None], t[i, :, last:]], 1)
            for total, t in zip(sums, (key, value), strict=True)
        ]
        groups = query.shape[1] // key.shape[1]
        keys, values = (part.repeat_interleave(groups, 0) for part in parts)
        logits = scale * query[i] @ keys.transpose(-1, -2)
        if (
            plan.uneven or plan.tokens_in < key.shape[2]
        ):  # else means of the image's groups are among their like
            logits[..., first : first + plan.tokens_kept] += sizes.log()
        if mask is not None:
            columns = torch.cat(
                [
                    torch.arange(first),
                    kept if kept.dim() == 1 else kept[i],
                    torch.arange(last, key.shape[2]),
                ]
            )
            own = mask.expand(query.shape[0], -1, -1, -1)[i][..., columns]
            logits = (
                logits.masked_fill(~own, -torch.inf) if own.dtype == torch.bool else logits + own
            )
        outputs.append(logits.softmax(-1).nan_to_num() @ values)
    return torch.stack(outputs).to(merged.output.dtype)
