"""Whole prompts for what watches a `generate` of short ones: stopping criteria, logits processors
and streamers count words from where the prompt ends, and lengths are those of whole prompts.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Prompts:
    """Prompts as the processor wrote them, and as they are read.

    Attributes:
        ids: [B, L].
        short: [B, L'].
    """

    ids: Tensor
    short: Tensor

    def whole(self, written: Tensor) -> Tensor:
        """Put whole prompts, n times each, in front of written [n B, L' + T], as [n B, L + T]."""
        prompts = self.ids.repeat_interleave(len(written) // len(self.ids), 0).to(written.device)
        return torch.cat([prompts, written[:, self.short.shape[1] :]], 1)

    def one(self, number: int, written: Tensor) -> Tensor:
        """Put its whole prompt in front of written [L' + T], which begins with prompt `number`, or
        with another where a prompt is continued several times: [L + T].
        """
        length = self.short.shape[1]
        begins = (
            row
            for row in (number, *range(len(self.short)))
            if row < len(self.short) and torch.equal(self.short[row], written[:length])
        )
        return torch.cat([self.ids[next(begins)], written[length:]])


class Watching:
    """A stopping criterion or logits processor that is shown whole prompts."""

    def __init__(self, watcher: Any, prompts: Prompts) -> None:
        self.watcher, self.prompts = watcher, prompts

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        return self.watcher(self.prompts.whole(input_ids), scores)

    def __getattr__(self, name: str) -> Any:  # transformers looks for eos_token_id, max_length
        if name in ("watcher", "prompts"):
            raise AttributeError(name)
        return getattr(self.watcher, name)


class Streaming:
    """A streamer that is given whole prompts."""

    def __init__(self, streamer: Any, prompts: Prompts) -> None:
        self.streamer, self.prompts, self._first = streamer, prompts, True

    def put(self, value: Tensor) -> None:
        """Pass on the prompts first, then words."""
        self.streamer.put(self.prompts.whole(value) if self._first else value)
        self._first = False

    def end(self) -> None:
        """Say that nothing more is written."""
        self.streamer.end()


def show_whole(call: dict[str, Any], prompts: Prompts) -> None:
    """Show whole prompts to all that watches a `generate` with these arguments."""
    for name in ("logits_processor", "stopping_criteria"):
        if name in call:
            own = call[name]
            call[name] = type(own)(Watching(one, prompts) for one in own)
    if "streamer" in call:
        call["streamer"] = Streaming(call["streamer"], prompts)
    if "prefix_allowed_tokens_fn" in call:
        allowed = call["prefix_allowed_tokens_fn"]
        call["prefix_allowed_tokens_fn"] = lambda number, written: allowed(
            number, prompts.one(number, written)
        )


def configs_of(model: Any, call: dict[str, Any]) -> list[Any]:
    """List the generation configs that hold for a `generate`, the call's own first."""
    found = (call.get("generation_config"), getattr(model, "generation_config", None))
    return [one for one in found if one is not None]


def shorten(model: nn.Module, call: dict[str, Any], gone: int) -> None:
    """Take what is gone off the lengths that a `generate` was given for whole prompts."""
    own: Any = getattr(model, "generation_config", None)
    config = copy.deepcopy(call.get("generation_config"))
    for name in ("max_length", "min_length"):
        new = f"{name[:3]}_new_tokens"
        if name in call:
            call[name] -= gone
        elif getattr(config, name, None):
            setattr(config, name, max(getattr(config, name) - gone, 0))
        elif getattr(own, name, None) and new not in call and not getattr(config, new, None):
            call[name] = max(getattr(own, name) - gone, 0)
    if config is not None:
        call["generation_config"] = config
