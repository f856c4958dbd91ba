"""List the rows of the caption table: the image tokens that the language model reads.

All rows use the same calls of the model (`mame_sd.captions.shorten`); a row only chooses the
vectors of an image. Each image is processed alone, so that no row depends on a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.apply import apply_mame
from mame_sd.captions.apply_captioner import apply_captioner
from mame_sd.captions.captioner_registry import images_of, layer_of
from mame_sd.captions.farthest import cosines, farthest_first
from mame_sd.captions.patch import attach, detach
from mame_sd.captions.prompts import Image
from mame_sd.captions.shorten import PromptShortener

from ..perception.rivals import rival_on
from ..perception.rules import ToMe
from ..tables import Row, named

SHARES = (0.5, 0.25, 0.11)

On = Callable[
    [Any], AbstractContextManager[PromptShortener]
]  # puts a row on a LLaVA for a `with` block


@contextmanager
def _attached(
    model: Any, seen: Callable[[dict[str, Any]], list[Image]]
) -> Iterator[PromptShortener]:
    """Attach a shortener to a model for a `with` block."""
    calls = PromptShortener(model, seen)
    attach(calls)
    try:
        yield calls
    finally:
        detach(model, calls)


def chosen(
    pick: Callable[[Tensor, int], Tensor], keep: float, model: Any
) -> AbstractContextManager[PromptShortener]:
    """Give the language model a share of an image's tokens, in their order.

    Args:
        pick: returns the places of `count` tokens of features [L, C].
        keep: the share.
        model: the LLaVA.
    """

    def some(image: Image) -> Image:
        count = max(1, round(keep * len(image.features)))
        places = pick(image.features, count).sort().values
        return Image(image.features[places], image.places[places], image.unmerged)

    return _attached(model, lambda call: [some(one) for one in images_of(model, call, 1.0)])


def first(features: Tensor, count: int) -> Tensor:
    """Return the first places."""
    return torch.arange(count, device=features.device)


def at_random(features: Tensor, count: int) -> Tensor:
    """Return random places; the features alone determine them."""
    data = features.detach().float().cpu().numpy().tobytes()
    seed = int.from_bytes(hashlib.sha256(data).digest()[:4], "big")
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))
    return order[:count].to(features.device)


def divprune(features: Tensor, count: int) -> Tensor:
    """Return the places whose nearest neighbours among themselves are farthest.

    DivPrune (Alvar et al. 2025, arXiv 2503.02175), greedily by cosine distance. Our default begins
    with it too.
    """
    return farthest_first(cosines(features[None]), count)[0]


@contextmanager
def merged(model: Any, **fields: Any) -> Iterator[PromptShortener]:
    """Merge behind the tower as `apply_mame` does with these fields."""
    handle = apply_captioner(model, **fields)
    try:
        yield handle.shortener
    finally:
        handle.remove()


@contextmanager
def in_tower(
    merging: Callable[[Any, int], AbstractContextManager[Any]], model: Any
) -> Iterator[PromptShortener]:
    """Merge tokens in the tower's blocks, and give the language model those that remain.

    Each remaining token stands at the place of the first token that it was made of.

    Args:
        merging: puts merging on a tower; it is called with the tower and the number of its blocks
            that are read.
        model: the LLaVA.
    """
    count, tower = layer_of(model), model.model.vision_tower
    skip = int(model.config.vision_feature_select_strategy == "default")
    patch = model.config.vision_config.patch_size

    def image(pixels: Tensor) -> Image:
        (left,) = images_of(model, {"pixel_values": pixels}, 1.0)
        height, width = (side // patch for side in pixels.shape[-2:])
        tokens = handle.num_prefix_tokens + height * width
        places = torch.arange(tokens, device=pixels.device)
        for number, plan in sorted(handle.plans().items()):
            if number < count:
                places = places[plan.kept.flatten()]
        places, order = places[skip:].sort()
        return Image(left.features[order], places - skip, tokens - skip)

    with merging(tower, count) as handle:
        handle.capture()
        with _attached(
            model, lambda call: list(map(image, call["pixel_values"].split(1)))
        ) as calls:
            yield calls


@contextmanager
def renumbered(row: On, model: Any) -> Iterator[PromptShortener]:
    """Count the positions of a row's remaining prompt from 0, as for a shorter prompt.

    This is the paper's form.
    """

    def count(module: nn.Module, args: Any, call: dict[str, Any]) -> Any:
        mask = call.get("attention_mask")  # of the tokens that are left; None if nothing merged
        if mask is None:
            return None
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        return args, {**call, "position_ids": positions[:, -call["inputs_embeds"].shape[1] :]}

    with row(model) as calls:
        hook = model.model.language_model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            yield calls
        finally:
            hook.remove()


_PAPER = partial(in_tower, lambda tower, count: apply_mame(tower, tau=0.8, blocks=count))
_EVERY: dict[str, tuple[str, On]] = {
    "baseline": ("baseline", partial(chosen, first, 1.0)),
    "tome": ("ToMe, r = 8", partial(in_tower, lambda tower, _: rival_on(tower, ToMe(8)))),
    "plain-0.8": ("MaMe, paper's form, tau .8", partial(renumbered, _PAPER)),
    **{f"keep-{k}": (f"MaMe, keep {k}", partial(merged, keep=k)) for k in SHARES},
    **{f"random-{k}": (f"random dropping, {k}", partial(chosen, at_random, k)) for k in SHARES},
    **{f"divprune-{k}": (f"DivPrune, {k}", partial(chosen, divprune, k)) for k in SHARES},
}
# a row's `method` puts it on a LLaVA for a `with` block
ROWS = {name: Row(name=name, label=label, method=on) for name, (label, on) in _EVERY.items()}


def chosen_rows(text: str | None) -> list[str]:
    """Return the names of the baseline and of the rows that `text` names, separated by commas.

    If `text` is None, return all rows. Raises UserError for an unknown name.
    """
    return list({"baseline": None, **named(text, ROWS)})
