"""A transformer's attention: the image's keys and values merge, after rotation; queries and text
stay whole. Those of SD3 and AuraFlow merge before their projections, queries too (`blocks.py`).

Merging, weighing beside text and correction are those of
`mame_sd.diffusion.families.keys.MergedKeys`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mame_sd import MaMeConfig, plan_merge
from mame_sd.core.partition import DRAWS
from mame_sd.core.plan import Plan
from mame_sd.diffusion.families.keys import MergedKeys
from mame_sd.diffusion.layer import NOTHING_TO_WIN, Tokens, nothing_to_win

from .attention import EngineCall
from .layers import Key, Settings
from .models import Transformer
from .unet import KEY, RULED_OUT, SMALL

OTHER = "attention over {} tokens has no image of {} x {} x {}"
TEXT = "the prompt's {} tokens are not fewer than the image's {}"
MASKED = "{} has a mask, with which the image starts elsewhere in each sample"
MASK = "a mask of shape {} is not for {} keys"


UNNAMED = "the engine does not say which of its blocks attends; update ComfyUI"


class JointPatch:
    """The override. It keeps nothing.

    Args:
        settings: those of the layers.
        transformer: where the image is.
    """

    def __init__(self, settings: Settings, transformer: Transformer) -> None:
        self.settings = settings
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
        options = kwargs["transformer_options"]
        call = options[KEY]
        engine = EngineCall(call.attention(function), q, k, v, args, kwargs)
        if call.awaited:
            attend = call.awaited.pop(0)
            return engine.run() if attend is None else attend(engine)
        keys = engine.heads_last(k)
        batch, length = keys.shape[:2]
        start = self._start(call, engine.heads_last(q).shape[1], length, engine.mask)
        if start is None:
            return engine.run()
        grid = call.place.grid
        tokens = Tokens(grid, start, length - start - math.prod(grid))
        feature = tokens.to_plane(keys[:, start : start + tokens.count].flatten(2))
        key = options.get("block_type"), options.get("block_index")
        planned = self._planned(call, key, feature, tokens)
        if planned is None:
            return engine.run()
        plan, config = planned
        return engine.attended(
            MergedKeys(plan, tokens, (batch, length), start, correct=config.correct, drawn=True)
        )

    def planned(self, call: Any, key: Key, image: Tensor) -> tuple[Plan, MaMeConfig, Tokens] | None:
        """What merges of an image's tokens [B, L, C], by which settings, and how they lie; None:
        they are left alone.
        """
        tokens = Tokens(call.place.grid)
        if image.shape[1] != tokens.count:
            call.run.note_left(OTHER, image.shape[1], *call.place.grid)
            return None
        planned = self._planned(call, key, image, tokens)
        return None if planned is None else (*planned, tokens)

    def _planned(
        self, call: Any, key: Key, feature: Tensor, tokens: Tokens
    ) -> tuple[Plan, MaMeConfig] | None:
        """What merges, by which settings."""
        number = self.transformer.layers.number(key)
        if number is None:
            number = call.counted
            call.counted += 1
        config = self.settings.of(key)
        if config is None:
            call.run.note_left(RULED_OUT if key in self.transformer.layers.names else UNNAMED)
            return None
        if tokens.count < config.min_tokens:
            call.run.note_left(SMALL, tokens.count, config.min_tokens)
            return None
        draw = None if call.draw is None else (call.draw + number) % DRAWS
        plan = plan_merge(feature, config, tokens.plane, draw=draw, leader=call.leader)
        if nothing_to_win(config, plan):
            call.run.note_left(NOTHING_TO_WIN)
            return None
        grid = tokens.size
        call.note_merged(plan, grid[grid[0] == 1 :])
        return plan, config

    def _start(self, call: Any, queries: int, length: int, mask: Tensor | None) -> int | None:
        """Where the image begins among `length` keys; None where they are left alone."""
        place, family = call.place, self.transformer.family
        tokens = math.prod(place.grid)
        if queries != length:
            return None  # cross-attention
        start: int | None = place.start(length)
        if start is None:
            call.run.note_left(OTHER, length, *place.grid)
        elif length <= call.text and family.image != "first":
            call.run.note_left(TEXT, call.text, tokens)  # may be the prompt's own attention
        elif mask is not None and not family.masked:
            call.run.note_left(MASKED, family.name)
        elif mask is not None and (mask.dim() < 2 or mask.shape[-1] != length):
            call.run.note_left(MASK, list(mask.shape), length)
        else:
            return start
        return None
