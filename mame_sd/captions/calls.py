"""A captioner's `forward` with fewer image tokens, and the calls that follow on its cache.

`generate` stays the model's own: it goes by whole prompts, as the processor wrote them, with their
lengths, masks and positions. On the way into the language model the prompts are shortened. Later
calls have a cache, which tells what its prompts lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.captions.known_captioners import axes_of
from mame_sd.captions.prompts import Image, kept_of
from mame_sd.forks import free_in_children
from mame_sd.report import counted
from mame_sd.upstream import cache_in, hidden_states_are_apart

_LOST = "tokens_that_merged"  # attribute of a cache: what its prompts lost
_READ_AGAIN = (  # options of `generate` that read prompts in pieces or by another model
    *("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"),
    "prefill_chunk_size",
)
_COUNTING = free_in_children(threading.Lock())
_TOWER = free_in_children(threading.RLock())
Own = Callable[..., Any]  # the model's own forward
_INSTEAD = {
    "inputs_embeds": "give input_ids, whose image tokens say where the images stand",
    "mm_encoder_outputs": "give pixel_values, which the tower merges itself",
    "pixel_values_videos": "give images alone, or set the handle's active to False for this call",
}


def tower_turn() -> AbstractContextManager[Any]:
    """Held while images go through a tower: one call at a time where transformers can't do more."""
    return nullcontext() if hidden_states_are_apart() else _TOWER


@dataclass
class CaptionReport:
    """What merging did to the images since the last reset.

    Attributes:
        images: how many.
        unmerged: image tokens of their prompts as the processor wrote them, summed.
        kept: image tokens that the language model read, summed.
    """

    images: int = 0
    unmerged: int = 0
    kept: int = 0

    @property
    def visual_before(self) -> float:
        """Image tokens of an image that the language model would have read."""
        return self.unmerged / max(self.images, 1)

    @property
    def visual_after(self) -> float:
        """Image tokens of an image that it read."""
        return self.kept / max(self.images, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        names = ("images", "visual_before", "visual_after")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        share = self.kept / self.unmerged if self.unmerged else 1.0
        return (
            f"{self.visual_before:.0f} -> {self.visual_after:.1f} visual tokens an image for the"
            f" language model ({share:.0%}), {counted(self.images, 'image')}"
        )

    def add(self, images: list[Image]) -> None:
        """Count these."""
        with _COUNTING:
            self.images += len(images)
            self.unmerged += sum(image.unmerged for image in images)
            self.kept += sum(len(image.places) for image in images)


@dataclass(frozen=True)
class Lost:
    """What prompts lost that a cache holds.

    Attributes:
        length: L, their tokens as the processor wrote them.
        real: bool [B, L'], False at padding among those that stay; None: all tokens stayed.
        after: LongTensor [B], the position of the first token that follows.
    """

    length: int
    real: Tensor | None
    after: Tensor


class Calls:
    """How one model's calls are given fewer tokens.

    Args:
        model: of a known class.
        seen: what the images of a call give, which has `pixel_values`.
    """

    def __init__(self, model: nn.Module, seen: Callable[[dict[str, Any]], list[Image]]) -> None:
        self.model, self.seen, self._active = model, seen, True
        self.counts = CaptionReport()

    @property
    def active(self) -> bool:
        """Whether tokens merge; False makes every call bit-equal to a model without merging."""
        return self._active

    @active.setter
    def active(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"active: expected True or False, got {value!r}; give one of these")
        self._active = value

    def images(self, call: dict[str, Any]) -> list[Image]:
        """Return what the images of a call give, and count them."""
        self._check(call)
        with tower_turn():
            images = self.seen(call)
        self.counts.add(images)
        return images

    def forward(self, own: Own, call: dict[str, Any], images: list[Image] | None = None) -> Any:
        """Run a call of prompts with images; None: it has `pixel_values`."""
        call = {name: value for name, value in call.items() if value is not None}
        call, lost = self.fewer(call, self.images(call) if images is None else images)
        output = own(**call)
        if isinstance(output, tuple):
            cache = next((one for one in output if hasattr(one, "get_seq_length")), None)
        else:
            cache = cache_in(output)
        if cache is not None:
            setattr(cache, _LOST, lost)
        return output

    def fewer(self, call: dict[str, Any], images: list[Image]) -> tuple[dict[str, Any], Lost]:
        """Put vectors in place of a call's tokens, fewer of them; and say what its prompts lost."""
        model: Any = self.model
        given, call = axes_of(model, call), {**call}
        ids, mask = call.pop("input_ids"), call.get("attention_mask")
        if getattr(cache_in(call), "is_compileable", False):
            raise ValueError(
                "cache_implementation: expected none beside images whose patches merge, got a"
                " static cache, whose masks are made for whole prompts; leave it out"
            )
        if mask is not None and mask.dim() != 2:
            raise ValueError(
                "attention_mask: expected [B, L] beside images whose patches merge, got"
                f" {list(mask.shape)}; give the processor's"
            )
        token, length = int(model.config.image_token_id), ids.shape[1]
        kept = kept_of(ids, mask, token, images)
        positions = torch.arange(length, device=ids.device).expand_as(ids)
        if given is not None:
            # Three axes; a fourth, before them, counts words.
            call["position_ids"] = positions = given[-3:] if given.dim() == 3 else given
        after = positions.expand(*positions.shape[:-2], len(ids), -1).amax(-1)
        lost = Lost(length, None, after.reshape(-1, len(ids)).amax(0) + 1)
        if any(len(image.places) < image.unmerged for image in images):
            lost = Lost(length, kept.real, lost.after)
            ids = kept.of(ids, self._padding())
            call["position_ids"] = kept.of_positions(positions)
            # Without a mask, positions with gaps would be taken for several texts in a row.
            call["attention_mask"] = kept.real.to(torch.long if mask is None else mask.dtype)
            if "labels" in call:
                call["labels"] = kept.of(call["labels"], -100)
            call.pop("cache_position", None)  # of whole prompts
        embeds = model.get_input_embeddings()(ids)
        seen = torch.cat([image.features for image in images]).to(embeds)
        call["inputs_embeds"] = embeds.masked_scatter((ids == token).unsqueeze(-1), seen)
        for name in ("pixel_values", "image_sizes", "image_grid_thw", "mm_token_type_ids"):
            call.pop(name, None)
        return call, lost

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


def has_images(call: dict[str, Any]) -> bool:
    """Tell whether a call has images or videos."""
    names = ("pixel_values", "pixel_values_videos", "mm_encoder_outputs")
    found = (call.get(name) for name in names)
    return any(one is not None and len(one) for one in found)


def after_images(call: dict[str, Any]) -> dict[str, Any]:
    """Give a call without images the mask and the positions that fit its cache, whose prompts may
    have lost tokens.

    Masks of whole prompts become those of what stays. Positions that the call does not have are
    counted on from the prompt's, as without merging.
    """
    cache = cache_in(call)
    lost: Lost | None = getattr(cache, _LOST, None)
    if lost is None:
        return call
    start = int(cache.get_seq_length())
    if not start:  # it was emptied
        delattr(cache, _LOST)
        return call
    tokens = call["input_ids"] if call.get("input_ids") is not None else call["inputs_embeds"]
    samples, new = tokens.shape[:2]
    times = samples // len(lost.after)  # where a cache was repeated
    prompt = lost.length if lost.real is None else lost.real.shape[1]
    later = start - prompt + new  # tokens since the prompt, these among them
    call = {name: value for name, value in call.items() if name != "cache_position"}
    if call.get("position_ids") is None:
        places = torch.arange(later - new, later, device=tokens.device)
        call["position_ids"] = lost.after.repeat_interleave(times)[:, None].to(places) + places
    if lost.real is not None:
        mask, real = call.get("attention_mask"), lost.real.repeat_interleave(times, 0)
        if mask is None:
            mask = torch.ones(samples, lost.length + later, dtype=torch.long, device=tokens.device)
        if mask.shape[-1] == lost.length + later:
            call["attention_mask"] = torch.cat([real.to(mask), mask[:, lost.length :]], 1)
    return call


def check_writing(model: Any, call: dict[str, Any]) -> None:
    """Raises ValueError for a `generate` that reads prompts in pieces or by another model."""
    configs = (call.get("generation_config"), model.generation_config)
    for given in (call, *(vars(config) for config in configs if config is not None)):
        for name in _READ_AGAIN:
            if given.get(name) is not None and given[name] is not False:
                raise ValueError(
                    f"{name}: expected none beside images whose patches merge, got it; leave it"
                    " out, or set the handle's active to False for this call"
                )


def check_empty(cache: Any, merged: bool = False) -> None:
    """Raises ValueError for a cache that holds tokens; with `merged` only for one that a merged
    call filled.
    """
    if cache is None or (merged and not hasattr(cache, _LOST)) or not cache.get_seq_length():
        return
    raise ValueError(
        "cache: expected an empty one beside images whose patches merge, got"
        f" {cache.get_seq_length()} tokens; give the whole conversation at once"
    )
