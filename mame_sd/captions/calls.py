"""A captioner's `forward` and `generate` with fewer image tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.captions.prompts import Image, Kept, Positions, counted, kept_of
from mame_sd.captions.shown import Prompts, configs_of, shorten, show_whole
from mame_sd.captions.towers import axes_of
from mame_sd.upstream import cache_in

_GONE = "tokens_that_merged"  # on a cache: [B, 1] from its columns to positions that follow
_READ_AGAIN = (
    *("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"),
    "prefill_chunk_size",
)
_COUNTING = threading.Lock()
Own = Callable[..., Any]  # the model's method of the call
_INSTEAD = {
    "inputs_embeds": "give input_ids, whose image tokens say where the images stand",
    "mm_encoder_outputs": "give pixel_values, which the tower merges itself",
    "pixel_values_videos": "give images alone, or set the handle's active to False for this call",
}


@dataclass
class VisualCounts:
    """Sums over images since the last reset.

    Attributes:
        images: how many.
        unmerged: image tokens of their prompts as the processor wrote them.
        kept: image tokens that the language model read.
    """

    images: int = 0
    unmerged: int = 0
    kept: int = 0

    def add(self, images: list[Image]) -> None:
        with _COUNTING:
            self.images += len(images)
            self.unmerged += sum(image.unmerged for image in images)
            self.kept += sum(len(image.places) for image in images)


@dataclass(frozen=True)
class Fewer:
    """A call whose prompts lost image tokens.

    Attributes:
        call: its arguments, with vectors for tokens.
        ids: of the tokens that stay [B, L'].
        gone: by how many tokens the prompts are shorter, L - L'.
        positions: theirs, as without merging.
    """

    call: dict[str, Any]
    ids: Tensor
    gone: int
    positions: Positions


class Running:
    """A `generate` whose prompts lost tokens, and the cache that it fills."""

    def __init__(self, positions: Positions) -> None:
        self.positions = positions
        self._cache: Any = None  # transformers 5.0 makes it in the first call

    def of(self, cache: Any, counted: Tensor) -> Tensor | None:
        """Positions as without merging [n B, T] of a call's; None: it is another text's.

        The first call is of the prompts. Without a cache each call begins with them again.
        """
        seen = 0 if cache is None else int(cache.get_seq_length())
        if seen + counted.shape[1] < self.positions.own.shape[-1]:
            return None
        if cache is not None and self._cache is None:
            self._cache = cache
        if cache is not None and cache is not self._cache:
            return None
        return self.positions.of(counted)


class Calls:
    """How one model's calls are given fewer tokens.

    Args:
        model: of a known class.
        seen: what the images of a call give, which has `pixel_values`.

    Attributes:
        active: False leaves every call as it is.
    """

    def __init__(self, model: nn.Module, seen: Callable[[dict[str, Any]], list[Image]]) -> None:
        self.model, self.seen, self.active = model, seen, True
        self.counts = VisualCounts()

    def forward(self, own: Own, call: dict[str, Any]) -> Any:
        """Run a call with images."""
        fewer = self.fewer(call)
        return _marked(own(**fewer.call), fewer)

    def generate(
        self,
        own: Own,
        call: dict[str, Any],
        answer: Callable[[Running | None], AbstractContextManager[None]],
    ) -> Any:
        """Write after prompts with images, and return whole prompts before what was written;
        `answer` is held meanwhile.
        """
        if call.get("inputs") is not None:
            call["input_ids"] = call.pop("inputs")
        _check_writes_alone(self.model, call)
        ids: Any = call.get("input_ids")
        none = {name: None for name, value in call.items() if value is None}  # options among them
        with torch.no_grad():
            fewer = self.fewer(call, padded=False)
            call, prompts = fewer.call, Prompts(ids, fewer.ids)
            shorten(self.model, call, fewer.gone)
            show_whole(call, prompts)
            placed = call.pop("position_ids", None) is not None
            with answer(Running(fewer.positions) if placed else None):
                written = own(**{**none, **call, "input_ids": fewer.ids})
        if isinstance(written, Tensor):
            return prompts.whole(written)
        written.sequences = prompts.whole(written.sequences)
        return _marked(written, fewer)

    def fewer(self, call: dict[str, Any], padded: bool = True) -> Fewer:
        """Put vectors in place of a call's tokens, fewer of them.

        `padded`: padding counts where positions are not given.
        """
        call = {name: value for name, value in call.items() if value is not None}
        self._check(call)
        images = self.seen(call)
        model: Any = self.model
        whole, mask = call.pop("input_ids"), call.get("attention_mask")
        ids, token = whole, int(model.config.image_token_id)
        kept = kept_of(ids, mask, token, images)
        self.counts.add(images)
        given = call.get("position_ids")
        if given is None:
            given = axes_of(model, ids, call)
        every = counted(ids, None if padded else mask) if given is None else given
        positions = Positions(every, kept)
        if any(len(image.places) < image.unmerged for image in images):
            ids = kept.of(ids, self._padding())
            call.update(_tokens_of(call, kept))
            call["position_ids"] = positions.own
        elif given is not None:
            call["position_ids"] = given
        embeds = model.get_input_embeddings()(ids)
        seen = torch.cat([image.features for image in images]).to(embeds)
        call["inputs_embeds"] = embeds.masked_scatter((ids == token).unsqueeze(-1), seen)
        for name in ("pixel_values", "image_sizes", "image_grid_thw", "mm_token_type_ids"):
            call.pop(name, None)
        return Fewer(call, ids, whole.shape[1] - ids.shape[1], positions)

    def _padding(self) -> int:
        """Return the id that padding is written with; its vectors are masked."""
        config: Any = getattr(self.model, "generation_config", None)
        token = getattr(config, "pad_token_id", None)
        return 0 if token is None else int(token)

    def _check(self, call: dict[str, Any]) -> None:
        """Raises ValueError for what can't go together with images whose patches merge."""
        for name, instead in _INSTEAD.items():
            if name in call:
                raise ValueError(f"{name}: expected none beside merged images, got it; {instead}")
        if "input_ids" not in call:
            raise ValueError("input_ids: expected prompts beside images, got none; give them")
        for name in ("vision_feature_layer", "vision_feature_select_strategy"):
            own = getattr(self.model.config, name, None)
            if call.pop(name, own) != own:
                raise ValueError(
                    f"{name}: expected that of the model's config ({own!r}) for merged images, got"
                    " another; set it there, before apply_mame"
                )
        check_empty(cache_in(call))
        mask = call.get("attention_mask")
        if mask is not None and mask.dim() != 2:
            raise ValueError(
                "attention_mask: expected [B, L] beside images whose patches merge, got"
                f" {list(mask.shape)}; give the processor's"
            )


def has_images(call: dict[str, Any]) -> bool:
    """Tell whether a call has images or videos."""
    found = (call.get(name) for name in ("pixel_values", "pixel_values_videos"))
    return any(one is not None and len(one) for one in found)


def at_places(call: dict[str, Any], running: Running | None) -> dict[str, Any]:
    """Give a call without images the positions that it has without merging, where its tokens
    follow, or are, those of a prompt that lost some.

    Args:
        call: its arguments.
        running: the `generate` that it is part of, where that lost tokens.
    """
    cache, positions = cache_in(call), call.get("position_ids")
    tokens = call.get("inputs_embeds")
    tokens = call.get("input_ids") if tokens is None else tokens
    gone = getattr(cache, _GONE, None)  # [B, 1]
    if gone is not None and cache is not None and not cache.get_seq_length():
        delattr(cache, _GONE)  # it was emptied
        gone = None
    if tokens is None or (running is None and gone is None):
        return call
    if positions is None:
        start = 0 if cache is None else int(cache.get_seq_length())
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        positions = positions.expand(len(tokens), -1)
        if gone is not None:
            gone = gone.to(positions.device)
            positions = positions + gone.repeat_interleave(len(tokens) // len(gone), 0)
    if running is not None:
        order = positions if positions.dim() == 2 else positions[0]  # of words, before the axes
        own = running.of(cache, order.expand(len(tokens), -1))
        if own is None and gone is None:
            return call
        positions = positions if own is None else own
    more: dict[str, Any] = {"position_ids": positions}
    if cache is None and call.get("attention_mask") is None:
        # without a mask positions with gaps would be taken for several texts in a row
        more["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.long).to(positions)
    return {**call, **more}


def check_empty(cache: Any, merged: bool = False) -> None:
    """Raises ValueError for a cache that holds tokens; with `merged` only for one that a merged
    call filled.
    """
    if cache is None or (merged and not hasattr(cache, _GONE)) or not cache.get_seq_length():
        return
    raise ValueError(
        "cache: expected an empty one beside images whose patches merge, got"
        f" {cache.get_seq_length()} tokens; give the whole conversation at once"
    )


def _marked(output: Any, fewer: Fewer) -> Any:
    """Note on the cache of a model's output which positions follow."""
    if isinstance(output, tuple):
        cache = next((one for one in output if hasattr(one, "get_seq_length")), None)
    else:
        cache = cache_in(output)
    if hasattr(cache, _GONE):
        delattr(cache, _GONE)
    if cache is not None and (fewer.gone or fewer.positions.own.dim() == 3):
        setattr(cache, _GONE, (fewer.positions.after - fewer.ids.shape[1])[:, None])
    return output


def _check_writes_alone(model: nn.Module, call: dict[str, Any]) -> None:
    """Raises ValueError for ways to write that read the prompt in pieces or by another model."""
    for config in (call, *configs_of(model, call)):
        for name in _READ_AGAIN:
            value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
            if value is not None and value is not False:
                raise ValueError(
                    f"{name}: expected none beside images whose patches merge, got it; leave it"
                    " out, or set the handle's active to False for this call"
                )


def _tokens_of(call: dict[str, Any], kept: Kept) -> dict[str, Any]:
    """Return what a call holds for each token that stays, but positions."""
    dtype = call["attention_mask"].dtype if "attention_mask" in call else torch.long
    # always a mask: without one positions with gaps would be taken for several texts in a row
    found: dict[str, Any] = {"attention_mask": kept.real.to(dtype)}
    if "labels" in call:
        found["labels"] = kept.of(call["labels"], -100)
    return found
