"""Shorten the prompts of a captioner, and prepare the calls that continue from its cache.

`generate` stays the model's own: it works with whole prompts as the processor wrote them, with
their lengths, masks and positions. The prompts are shortened on the way into the language model.
The cache that this call returns records what was removed, so that later calls fit it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.captions.captioner_registry import axes_of
from mame_sd.captions.prompts import Image, shortened
from mame_sd.compat import cache_in, hidden_states_are_apart
from mame_sd.forks import free_in_children
from mame_sd.report import LayerTokens, Report, Sums, counted

_REMOVED = "tokens_that_merged"  # attribute of a cache that holds a `Removed`
_READ_AGAIN = (  # options of `generate` that read prompts in pieces or by another model
    *("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"),
    "prefill_chunk_size",
)
_TOWER = free_in_children(threading.RLock())
Forward = Callable[..., Any]  # the forward that the model has without merging
_INSTEAD = {
    "inputs_embeds": "give input_ids, whose image tokens say where the images stand",
    "mm_encoder_outputs": "give pixel_values, which the tower merges itself",
    "pixel_values_videos": "give images only, or set the handle's active to False for this call",
}


def tower_turn() -> AbstractContextManager[Any]:
    """Return a lock for the vision tower, if the installed transformers runs one call at a time."""
    return nullcontext() if hidden_states_are_apart() else _TOWER


@dataclass(frozen=True)
class CaptionReport(Report):
    """Visual tokens before and after merging since the last reset.

    Attributes:
        layers: one entry, the language model's input: image tokens per image as the processor wrote
            them, and those that the language model read.
        images: number of images.
    """

    layers: tuple[LayerTokens]
    images: int

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**super().to_dict(), "images": self.images}

    def __str__(self) -> str:
        (tokens,) = self.layers
        return (
            f"{tokens.tokens_in:.0f} -> {tokens.tokens_kept:.1f} visual tokens an image for the"
            f" language model ({tokens.share:.0%}), {counted(self.images, 'image')}"
        )


@dataclass(frozen=True)
class Removed:
    """Record what was removed from the prompts that a cache holds.

    Attributes:
        length: L, their tokens as the processor wrote them.
        real: bool [B, L'], False at padding among the remaining tokens. If None, no token was
            removed.
        after: LongTensor [B], the position of the first token after each prompt.
    """

    length: int
    real: Tensor | None
    after: Tensor


class PromptShortener:
    """Shorten the prompts in the calls of one model, unless `active` is False.

    Args:
        model: a model of a registered class.
        see: returns the merged images of a call that has `pixel_values`.
    """

    def __init__(self, model: nn.Module, see: Callable[[dict[str, Any]], list[Image]]) -> None:
        self.model, self.see, self.active = model, see, True
        self.sums = Sums(3)  # images, their tokens, and those that stay

    def report(self) -> CaptionReport:
        """Return the visual tokens so far."""
        images, unmerged, kept = self.sums.totals()
        before, after = (count / max(images, 1) for count in (unmerged, kept))
        tokens = LayerTokens(name="visual tokens", tokens_in=before, tokens_kept=after)
        return CaptionReport((tokens,), images)

    def images(self, call: dict[str, Any]) -> list[Image]:
        """Return the merged images of a call, and count them."""
        self._check(call)
        with tower_turn():
            images = self.see(call)
        unmerged = sum(image.unmerged for image in images)
        self.sums.add(len(images), unmerged, sum(len(image.places) for image in images))
        return images

    def forward(
        self, original: Forward, call: dict[str, Any], images: list[Image] | None = None
    ) -> Any:
        """Run a call whose prompts contain images; the cache records what was removed from them.

        Args:
            original: the model's own forward.
            call: its arguments by name.
            images: the merged images. If None, they are computed from the call's `pixel_values`.
        """
        call = {name: value for name, value in call.items() if value is not None}
        call, removed = self.shorten(call, self.images(call) if images is None else images)
        output = original(**call)
        if isinstance(output, tuple):
            cache = next((one for one in output if hasattr(one, "get_seq_length")), None)
        else:
            cache = cache_in(output)
        if cache is not None:
            setattr(cache, _REMOVED, removed)
        return output

    def shorten(self, call: dict[str, Any], images: list[Image]) -> tuple[dict[str, Any], Removed]:
        """Replace a call's token ids by fewer vectors; return also what was removed."""
        model: Any = self.model
        axes, call = axes_of(model, call), {**call}
        ids, mask = call.pop("input_ids"), call.get("attention_mask")
        if getattr(cache_in(call), "is_compileable", False):
            raise ValueError(
                "cache_implementation: expected none with images whose patches merge, got a"
                " static cache, whose masks are made for whole prompts; leave it out"
            )
        if mask is not None and mask.dim() != 2:
            raise ValueError(
                "attention_mask: expected [B, L] with images whose patches merge, got"
                f" {list(mask.shape)}; give the processor's"
            )
        token, length = int(model.config.image_token_id), ids.shape[1]
        kept = shortened(ids, mask, token, images)
        positions = torch.arange(length, device=ids.device).expand_as(ids)
        if axes is not None:
            # Three axes; a fourth one before them counts words.
            call["position_ids"] = positions = axes[-3:] if axes.dim() == 3 else axes
        after = positions.expand(*positions.shape[:-2], len(ids), -1).amax(-1)
        removed = Removed(length, None, after.reshape(-1, len(ids)).amax(0) + 1)
        if any(len(image.places) < image.unmerged for image in images):
            removed = Removed(length, kept.real, removed.after)
            generation = getattr(model, "generation_config", None)
            ids = kept.of(ids, getattr(generation, "pad_token_id", None) or 0)  # masked below
            call["position_ids"] = kept.of(positions)
            # Without a mask, transformers takes positions with gaps for several packed texts.
            call["attention_mask"] = kept.real.to(torch.long if mask is None else mask.dtype)
            if "labels" in call:
                call["labels"] = kept.of(call["labels"], -100)
            call.pop("cache_position", None)  # counts the whole prompts
        embeds = model.get_input_embeddings()(ids)
        features = torch.cat([image.features for image in images]).to(embeds)
        call["inputs_embeds"] = embeds.masked_scatter((ids == token).unsqueeze(-1), features)
        for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids"):
            call.pop(name, None)
        return call, removed

    def _check(self, call: dict[str, Any]) -> None:
        """Raise ValueError for arguments that can't be combined with merged images."""
        for name, instead in _INSTEAD.items():
            if name in call:
                raise ValueError(f"{name}: expected none with merged images, got it; {instead}")
        if "input_ids" not in call:
            raise ValueError("input_ids: expected prompts with images, got none; give them")
        for name in ("vision_feature_layer", "vision_feature_select_strategy"):
            expected = getattr(self.model.config, name, None)
            if call.pop(name, expected) != expected:
                raise ValueError(
                    f"{name}: expected that of the model's config ({expected!r}) for merged images,"
                    " got another; set it there, before apply_mame"
                )
        check_empty(cache_in(call))


def has_images(call: dict[str, Any]) -> bool:
    """Return True if a call has images or videos."""
    names = ("pixel_values", "pixel_values_videos", "mm_encoder_outputs")
    values = (call.get(name) for name in names)
    return any(value is not None and len(value) for value in values)


def after_images(call: dict[str, Any]) -> dict[str, Any]:
    """Fit the mask and the positions of a call without images to its shortened cache.

    Masks of whole prompts become masks of the remaining tokens. Missing positions continue those of
    the whole prompt, as without merging.
    """
    cache = cache_in(call)
    removed: Removed | None = getattr(cache, _REMOVED, None)
    if removed is None:
        return call
    start = int(cache.get_seq_length())
    if not start:  # the cache was emptied
        delattr(cache, _REMOVED)
        return call
    tokens = call["input_ids"] if call.get("input_ids") is not None else call["inputs_embeds"]
    samples, new = tokens.shape[:2]
    times = samples // len(removed.after)  # the cache may have been repeated
    prompt = removed.length if removed.real is None else removed.real.shape[1]
    later = start - prompt + new  # tokens after the prompt, including these
    call = {name: value for name, value in call.items() if name != "cache_position"}
    if call.get("position_ids") is None:
        places = torch.arange(later - new, later, device=tokens.device)
        call["position_ids"] = removed.after.repeat_interleave(times)[:, None].to(places) + places
    if removed.real is not None:
        mask, real = call.get("attention_mask"), removed.real.repeat_interleave(times, 0)
        if mask is None:
            mask = torch.ones(
                samples, removed.length + later, dtype=torch.long, device=tokens.device
            )
        if mask.shape[-1] == removed.length + later:
            call["attention_mask"] = torch.cat([real.to(mask), mask[:, removed.length :]], 1)
    return call


def check_generate(model: Any, call: dict[str, Any]) -> None:
    """Raise ValueError if `generate` would read prompts in pieces or by another model."""
    configs = (call.get("generation_config"), model.generation_config)
    for options in (call, *(vars(config) for config in configs if config is not None)):
        for name in _READ_AGAIN:
            if options.get(name) is not None and options[name] is not False:
                raise ValueError(
                    f"{name}: expected none with images whose patches merge, got it; leave it"
                    " out, or set the handle's active to False for this call"
                )


def check_empty(cache: Any, merged: bool = False) -> None:
    """Raise ValueError if a cache holds tokens; if `merged`, only if a merged call filled it."""
    if cache is None or (merged and not hasattr(cache, _REMOVED)) or not cache.get_seq_length():
        return
    raise ValueError(
        "cache: expected an empty one with images whose patches merge, got"
        f" {cache.get_seq_length()} tokens; give the whole conversation at once"
    )
