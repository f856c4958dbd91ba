"""A transformer's attention: the image's keys and values merge, after rotation; queries and text
stay whole.

Merging, weighing beside text and correction are those of
`mame_sd.diffusion.families.keys.MergedKeys`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mame_sd import MaMeConfig, plan_merge
from mame_sd.diffusion.families.keys import MergedKeys
from mame_sd.diffusion.layer import NOTHING_TO_WIN, Tokens, nothing_to_win

from .attention import EngineCall
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

    def attend(
        self,
        function: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """The output of the engine's call; an `optimized_attention_override`."""
        call = kwargs["transformer_options"][KEY]
        engine = EngineCall(call.attention(function), q, k, v, args, kwargs)
        keys = engine.heads_last(k)
        batch, length = keys.shape[:2]
        start = self._start(call, engine.heads_last(q).shape[1], length, engine.mask)
        if start is None:
            return engine.run()
        grid = call.place.grid
        tokens = Tokens(grid, start, length - start - math.prod(grid))
        feature = tokens.to_plane(keys[:, start : start + tokens.count].flatten(2))
        plan = plan_merge(feature, self.config, tokens.plane, draw=call.draw, leader=call.leader)
        call.draw = None if call.draw is None else call.draw + 1
        if nothing_to_win(self.config, plan):
            call.run.note_left(NOTHING_TO_WIN)
            return engine.run()
        call.run.note_merged(plan, grid[grid[0] == 1 :])
        return engine.attended(
            MergedKeys(
                plan, tokens, (batch, length), start, correct=self.config.correct, drawn=True
            )
        )

    def _start(self, call: Any, queries: int, length: int, mask: Tensor | None) -> int | None:
        """Where the image begins among `length` keys; None where they are left alone."""
        place, family = call.place, self.transformer.family
        tokens = math.prod(place.grid)
        if queries != length:
            return None  # cross-attention
        start: int | None = place.start(length)
        if start is None:
            call.run.note_left(OTHER, length, *place.grid)
        elif tokens < self.config.min_tokens:
            call.run.note_left(SMALL, tokens, self.config.min_tokens)
        elif length <= self.transformer.padded(call.text) and family.image != "first":
            call.run.note_left(TEXT, call.text, tokens)  # may be the prompt's own attention
        elif mask is not None and not family.masked:
            call.run.note_left(MASKED, family.name)
        elif mask is not None and (mask.dim() < 2 or mask.shape[-1] != length):
            call.run.note_left(MASK, list(mask.shape), length)
        else:
            return start
        return None
