"""Replacements for `forward` and `generate` of a captioner: they call the model's own with fewer
image tokens.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.captions.prompts import Image, Kept, Positions, counted, kept_of
from mame_sd.captions.towers import axes_of
from mame_sd.captions.upstream import cache_in

_NAMES = ("forward", "generate")
_GONE = "tokens_that_merged"  # on a cache: [B, 1] from its columns to positions that follow
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
    """Both calls of one model.

    Args:
        model: of a known class.
        seen: what the images of a call give, which has `pixel_values`.

    Attributes:
        active: False leaves every call as it is.
    """

    def __init__(self, model: nn.Module, seen: Callable[[dict[str, Any]], list[Image]]) -> None:
        self.model, self.seen, self.active = model, seen, True
        self.counts = VisualCounts()
        self._running: Running | None = None  # the innermost `generate`
        self._own = {name: Call(self, name) for name in _NAMES}

    def put(self) -> None:
        """Puts them on the model.

        Raises:
            ValueError: another tool has replaced one of them.
        """
        for name in _NAMES:
            there = self.model.__dict__.get(name)
            if there is not None and not isinstance(there, Call):
                raise ValueError(
                    f"expected a {type(self.model).__name__} with its own {name}, found another"
                    f" tool's in its place ({there!r}); apply merging before that tool"
                )
        self.model.__dict__.update(self._own)

    def take(self) -> None:
        """Takes them off the model."""
        for name in _NAMES:
            self.model.__dict__.pop(name, None)

    def run(self, name: str, call: dict[str, Any]) -> Any:
        """The model's own call of this name, with fewer tokens where it is given images."""
        own = getattr(type(self.model), name)
        if name == "forward":
            fewer = self._fewer(call)
            if fewer is None:
                return own(self.model, **self._at_places(call))
            return _marked(own(self.model, **fewer.call), fewer)
        if call.get("inputs") is not None:
            call["input_ids"] = call.pop("inputs")
        ids: Any = call.get("input_ids")
        with torch.no_grad():
            fewer = self._fewer(call, padded=False)
            if fewer is None:
                _check_empty(cache_in(call), merged=True)
                return own(self.model, **call)
            call, short = fewer.call, fewer.ids
            _shorten(call, fewer.gone)
            before = self._running
            if call.pop("position_ids", None) is not None:
                self._running = Running(fewer.positions)
            inner: Any = self.model.get_submodule("model")
            deltas = getattr(inner, "rope_deltas", None)
            try:
                written = own(self.model, **call, input_ids=short)
            finally:
                self._running = before
                if hasattr(inner, "rope_deltas"):
                    inner.rope_deltas = deltas  # those of the short prompts suit no other call
        if isinstance(written, Tensor):
            return _with_dropped(written, ids, short)
        written.sequences = _with_dropped(written.sequences, ids, short)
        return _marked(written, fewer)

    def _fewer(self, call: dict[str, Any], padded: bool = True) -> Fewer | None:
        """The call with vectors for tokens, fewer of them. None: it has no images, or is left as it
        is.

        `padded`: padding counts where positions are not given.
        """
        call = {name: value for name, value in call.items() if value is not None}
        if not any(len(call.get(name, ())) for name in ("pixel_values", "pixel_values_videos")):
            return None
        if not self.active:
            return None
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
        fewer = any(len(image.places) < image.unmerged for image in images)
        if fewer:
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

    def _at_places(self, call: dict[str, Any]) -> dict[str, Any]:
        """A call without images whose tokens follow, or are, those of a prompt that lost some: with
        positions as they are without merging.
        """
        cache, positions = cache_in(call), call.get("position_ids")
        tokens = call.get("input_ids") if call.get("inputs_embeds") is None else None
        tokens = call.get("inputs_embeds") if tokens is None else tokens
        gone = getattr(cache, _GONE, None)  # [B, 1]
        if gone is not None and cache is not None and not cache.get_seq_length():
            delattr(cache, _GONE)  # it was emptied
            gone = None
        if tokens is None or (self._running is None and gone is None):
            return call
        if positions is None:
            start = 0 if cache is None else int(cache.get_seq_length())
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
            positions = positions.expand(len(tokens), -1)
            if gone is not None:
                gone = gone.to(positions.device)
                positions = positions + gone.repeat_interleave(len(tokens) // len(gone), 0)
        if self._running is not None:
            order = positions if positions.dim() == 2 else positions[0]  # of words, before the axes
            own = self._running.of(cache, order.expand(len(tokens), -1))
            if own is None and gone is None:
                return call
            positions = positions if own is None else own
        more: dict[str, Any] = {"position_ids": positions}
        if cache is None and call.get("attention_mask") is None:
            # without a mask positions with gaps would be taken for several texts in a row
            more["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.long).to(positions)
        return {**call, **more}

    def _padding(self) -> int:
        """The id that padding is written with; its vectors are masked."""
        config: Any = getattr(self.model, "generation_config", None)
        token = getattr(config, "pad_token_id", None)
        return 0 if token is None else int(token)

    def _check(self, call: dict[str, Any]) -> None:
        """Raises ValueError for what can't go together with images whose patches merge."""
        for name, instead in _INSTEAD.items():
            if name in call:
                raise ValueError(f"{name}: expected none beside merged images, got it; {instead}")
        for name in ("vision_feature_layer", "vision_feature_select_strategy"):
            own = getattr(self.model.config, name, None)
            if call.pop(name, own) != own:
                raise ValueError(
                    f"{name}: expected that of the model's config ({own!r}) for merged images, got"
                    " another; set it there, before apply_mame"
                )
        _check_empty(cache_in(call))
        mask = call.get("attention_mask")
        if mask is not None and mask.dim() != 2:
            raise ValueError(
                "attention_mask: expected [B, L] beside images whose patches merge, got"
                f" {list(mask.shape)}; give the processor's"
            )


class Call:
    """Replaces one method of a model, with the same signature."""

    def __init__(self, calls: Calls, name: str) -> None:
        self.calls, self.name = calls, name
        signature = inspect.signature(getattr(type(calls.model), name))
        self.__signature__ = signature.replace(
            parameters=list(signature.parameters.values())[1:], return_annotation=Any
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = [name for name in self.__signature__.parameters if name != "kwargs"]
        return self.calls.run(self.name, {**dict(zip(names, args, strict=False)), **kwargs})


def calls_on(module: nn.Module) -> list[Calls]:
    """What stands on `module`."""
    there = module.__dict__.get("forward")
    return [there.calls] if isinstance(there, Call) else []


def _check_empty(cache: Any, merged: bool = False) -> None:
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
    """A model's output whose cache knows which positions follow."""
    if isinstance(output, tuple):
        cache = next((one for one in output if hasattr(one, "get_seq_length")), None)
    else:
        cache = cache_in(output)
    if hasattr(cache, _GONE):
        delattr(cache, _GONE)
    if cache is not None and (fewer.gone or fewer.positions.own.dim() == 3):
        setattr(cache, _GONE, (fewer.positions.after - fewer.ids.shape[1])[:, None])
    return output


def _shorten(call: dict[str, Any], gone: int) -> None:
    """Takes what is gone off the lengths that a `generate` was given for whole prompts.

    Raises:
        ValueError: for ways to write that read the prompt in pieces or by another model.
    """
    config = call.get("generation_config")
    for name in ("assistant_model", "prompt_lookup_num_tokens", "prefill_chunk_size"):
        if call.get(name) is not None or getattr(config, name, None) is not None:
            raise ValueError(
                f"{name}: expected none beside images whose patches merge, got it; leave it out, or"
                " set the handle's active to False for this call"
            )
    if config is not None:
        call["generation_config"] = config = copy.deepcopy(config)
    for length in ("max_length", "min_length"):
        if call.get(length) is not None:
            call[length] -= gone
        if getattr(config, length, None):
            setattr(config, length, max(getattr(config, length) - gone, 0))


def _tokens_of(call: dict[str, Any], kept: Kept) -> dict[str, Any]:
    """What a call holds for each token but positions, of those that stay."""
    dtype = call["attention_mask"].dtype if "attention_mask" in call else torch.long
    # always a mask: without one positions with gaps would be taken for several texts in a row
    found: dict[str, Any] = {"attention_mask": kept.real.to(dtype)}
    if "labels" in call:
        found["labels"] = kept.of(call["labels"], -100)
    return found


def _with_dropped(written: Tensor, ids: Tensor, short: Tensor) -> Tensor:
    """Tokens [n B, L' + T] that begin with prompts `short` [B, L'], with prompts ids [B, L]."""
    prompts = ids.repeat_interleave(len(written) // len(ids), 0)
    return torch.cat([prompts, written[:, short.shape[1] :]], 1)
