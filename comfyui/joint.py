"""A transformer's attention: the image's keys and values merge, after rotation; queries and text stay whole.

Where text stands beside the image, the logit of a merged key has the logarithm added of how many keys it stands for: it would else weigh
too little against text.

The engine hands its attention function and that function's arguments to `optimized_attention_override`:
(function, q, k, v, heads, mask, ..., transformer_options=). With `skip_reshape` q, k and v are [B, H, L, D], else [B, L, H * D] (SD3's
v: [B, L, H, D]).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd import MaMeConfig, plan_merge
from mame_sd.diffusion.layer import NOTHING_TO_WIN, nothing_to_win

from .models import Transformer
from .unet import KEY, SMALL

OTHER = "attention over {} tokens has no image of {} x {} x {}"
TEXT = "the prompt's {} tokens are not fewer than the image's {}"
MASKED = "{} has a mask, with which the image starts elsewhere in each sample"
MASK = "a mask of shape {} is not for {} keys"


class JointPatch:
    """The override. It keeps nothing.

    Args:
        config: the settings; `merge` is not read.
        transformer: where the image is.
    """

    def __init__(self, config: MaMeConfig, transformer: Transformer) -> None:
        self.config = config
        self.transformer = transformer

    def __call__(
        self, function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        call = kwargs["transformer_options"][KEY]
        mask = kwargs["mask"] if "mask" in kwargs else args[1] if len(args) > 1 else None
        heads_first = kwargs.get("skip_reshape", False)
        tokens = 2 if heads_first else 1
        start = self._start(call, q.shape[tokens], k.shape[tokens], mask)
        if start is not None:
            k, v, mask = self._merged(call, k, v, mask, start, heads_first)
            if len(args) > 1:
                args = (args[0], mask, *args[2:])
            else:
                kwargs = {**kwargs, "mask": mask}
        if call.override is not None:
            return call.override(function, q, k, v, *args, **kwargs)
        return function(q, k, v, *args, **kwargs)

    def _start(self, call: Any, queries: int, length: int, mask: Tensor | None) -> int | None:
        """Where the image begins among `length` keys; None where they are left alone."""
        tokens = math.prod(call.grid)
        if queries != length:
            return None  # cross-attention
        start = self.transformer.start(length, tokens, call.references)
        if start is None:
            call.run.note_left(OTHER, length, *call.grid)
        elif tokens < self.config.min_tokens:
            call.run.note_left(SMALL, tokens, self.config.min_tokens)
        elif self.transformer.family.last and tokens <= self.transformer.padded(call.text):
            call.run.note_left(TEXT, call.text, tokens)  # attention among the prompt's tokens would look alike
        elif mask is not None and not self.transformer.family.masked:
            call.run.note_left(MASKED, self.transformer.family.name)
        elif mask is not None and (mask.dim() < 2 or mask.shape[-1] != length):
            call.run.note_left(MASK, list(mask.shape), length)
        else:
            return start
        return None

    def _merged(
        self, call: Any, k: Tensor, v: Tensor, mask: Tensor | None, start: int, heads_first: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        t, h, w = call.grid
        stop = start + t * h * w

        def image(x: Tensor) -> Tensor:
            """[B, n, C] of the image, frames interleaved: a tile spans neighbours in time as well as in space."""
            flat = (x.transpose(1, 2) if heads_first else x).flatten(2)[:, start:stop]
            return flat if t == 1 else flat.unflatten(1, (t, h, w)).transpose(1, 2).flatten(1, 3)

        keys = image(k)
        plan = plan_merge(keys, self.config, (h * t, w), draw=call.draw)
        call.draw = None if call.draw is None else call.draw + 1
        if nothing_to_win(self.config, plan):
            call.run.note_left(NOTHING_TO_WIN)
            return k, v, mask
        call.run.note_merged(plan, call.grid[t == 1 :])

        def merged(x: Tensor, image: Tensor) -> Tensor:
            y = plan.merge(image)
            if heads_first:
                y = y.unflatten(2, (x.shape[1], x.shape[3])).transpose(1, 2)
            else:
                x = x.flatten(2)
            return torch.cat([x[..., :start, :], y, x[..., stop:, :]], -2)

        mask = None if mask is None else columns_of(mask, plan.kept, call.grid, start)
        others = start, k.shape[2 if heads_first else 1] - stop
        if any(others):
            mask = weighed(mask, F.pad(plan.sizes.log(), others), k.dtype)
        return merged(k, keys), merged(v, image(v)), mask


def weighed(mask: Tensor | None, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask with `weights` added to the logits of its keys, of at least three dimensions.

    Args:
        mask: [Q, L], [B, Q, L] or [B, H, Q, L], or broadcast to those; bool, or what is added to logits.
        weights: [L] or [B, L].
        dtype: of the queries.
    """
    weights = weights.to(dtype).view(-1, *(1,) * (1 if mask is None else max(mask.dim() - 2, 1)), weights.shape[-1])
    if mask is None:
        return weights
    return torch.where(mask, weights, -torch.inf) if mask.dtype == torch.bool else mask + weights


def columns_of(mask: Tensor, kept: Tensor, grid: tuple[int, int, int], start: int) -> Tensor:
    """The mask [..., L] for the merged keys: a merged key is masked as the token is that it was made into.

    Args:
        mask: [Q, L], [B, Q, L] or [B, H, Q, L], or broadcast to those.
        kept: [n] or [B, n], positions in the interleaved image.
    """
    t, h, w = grid
    order = torch.arange(t * h * w, device=kept.device).view(t, h, w).transpose(0, 1).flatten()
    kept = order[kept] + start
    before = torch.arange(start, device=kept.device).expand(*kept.shape[:-1], -1)
    after = torch.arange(start + t * h * w, mask.shape[-1], device=kept.device).expand(*kept.shape[:-1], -1)
    columns = torch.cat([before, kept, after], -1)
    if columns.dim() == 1:
        return mask.index_select(-1, columns)
    if mask.dim() == 2:
        mask = mask.unsqueeze(0)
    b = columns.shape[0]
    columns = columns.view(b, *(1,) * (mask.dim() - 2), -1).expand(b, *mask.shape[1:-1], -1)
    return mask.expand(b, *mask.shape[1:]).gather(-1, columns)
