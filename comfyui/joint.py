"""Merge keys and values of the image in a transformer's attention, after rotation.

Queries and text don't merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .attention import EngineCall
from .layers import Key, Settings, left_alone
from .models import Transformer
from .run import KEY, RULED_OUT

OTHER = "attention over {} tokens has no image of {} x {} x {}"
TEXT = "the prompt's {} tokens are not fewer than the image's {}"
MASKED = "{} has a mask, with which the image starts elsewhere in each sample"
MASK = "a mask of shape {} is not for {} keys"
UNNAMED = "the engine does not say which of its blocks attends; update ComfyUI"


class JointPatch:
    """The attention override. It has no state.

    Args:
        settings: settings of the layers.
        transformer: says where the image is.
    """

    def __init__(self, settings: Settings, transformer: Transformer) -> None:
        self.settings = settings
        self.transformer = transformer

    def attend(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Compute the output of the engine's call, as an `optimized_attention_override`."""
        options = kwargs["transformer_options"]
        call = options[KEY]
        engine: EngineCall = call.of_engine(function, *args, **kwargs)
        queries, length = (engine.heads_last(t).shape[1] for t in (engine.q, engine.k))
        start = self._start(call, queries, length, engine.mask)
        if start is None:
            return engine.run()
        key: Key = options.get("block_type"), options.get("block_index")
        layers = self.settings.layers
        if length == math.prod(call.place.grid) and (*key, 1) in layers.names:
            key = (*key, 1)  # SD3.5's second attention of a block, over only the image
        number = layers.number(key)
        if number is None:
            number = call.unnamed
            call.unnamed += 1
        config, grid = self.settings.of(key), call.place.grid
        if config is None:
            call.run.note_left(RULED_OUT if key in layers.names else UNNAMED)
            return engine.run()
        heads, width = engine.heads_last(engine.q).shape[2:]
        if why := left_alone(config, engine.k, math.prod(grid), heads * width, width):
            call.run.note_left(*why)
            return engine.run()
        output: Tensor = call.merged_keys(config, grid[grid[0] == 1 :], number, start, engine)
        return output

    def _start(self, call: Any, queries: int, length: int, mask: Tensor | None) -> int | None:
        """Return where the image begins among `length` keys; None if they don't merge."""
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
