"""Rows of the caption table: what becomes of an image's tokens between tower and language model.

All rows go through the same calls of the model (`mame_sd.captions.calls`); a row says only which
vectors an image gives. Each image is seen alone, so that a row does not depend on a batch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mame_sd.apply import mame
from mame_sd.captions.apply_captioner import apply_captioner
from mame_sd.captions.calls import Calls, Fewer
from mame_sd.captions.farthest import cosines, farthest_first
from mame_sd.captions.on_model import calls_on, put, take
from mame_sd.captions.prompts import Image
from mame_sd.captions.towers import layer_of
from mame_sd.perception.known_encoders import find_encoder

from ..perception.rivals import Traced, on_smaller_images, rival_on
from ..perception.rules import ToMe
from ..tables import Row, named


def whole_of(model: Any, pixels: Tensor) -> Tensor:
    """Projected features [L, C] of pixels [1, 3, h, w], as the model itself has them."""
    return torch.cat(list(_features(model, _states(model, pixels)[None])))


def _states(model: Any, pixels: Tensor) -> Tensor:
    """Tokens [L, C] that the projector is given of pixels [1, 3, h, w], prefix ones included."""
    output = model.model.vision_tower(pixels, output_hidden_states=True, return_dict=True)
    states: Tensor = output.hidden_states[layer_of(model)][0]
    return states


def _features(model: Any, states: Tensor) -> Tensor:
    skip = int(model.config.vision_feature_select_strategy == "default")
    features: Tensor = model.model.multi_modal_projector(states[:, skip:])
    return features


@contextmanager
def _giving(model: Any, images: Callable[[Tensor], Image]) -> Iterator[Calls]:
    """`model` whose images give what `images` makes of pixels [1, 3, h, w]."""
    if calls_on(model) is not None:
        raise RuntimeError("expected a model without merging on it")
    calls = Calls(model, lambda call: [images(one) for one in call["pixel_values"].split(1)])
    put(calls)
    try:
        yield calls
    finally:
        take(model, calls)


def chosen(pick: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Some of the model's own visual tokens, in their order; `pick` gives places of [L, C]."""

    def on(model: Any) -> Any:
        def image(pixels: Tensor) -> Image:
            features = whole_of(model, pixels)
            places = pick(features).sort().values
            return Image(features[places], places, len(features))

        return _giving(model, image)

    return on


def everything(features: Tensor) -> Tensor:
    """All of them."""
    return torch.arange(len(features), device=features.device)


def random_of(keep: float) -> Callable[[Tensor], Tensor]:
    """A share at random; which follows from the features alone."""

    def pick(features: Tensor) -> Tensor:
        data = features.detach().float().cpu().numpy().tobytes()
        seed = int.from_bytes(hashlib.sha256(data).digest()[:4], "big")
        order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))
        return order[: max(1, round(keep * len(features)))].to(features.device)

    return pick


def divprune_of(keep: float) -> Callable[[Tensor], Tensor]:
    """The share whose nearest neighbours among themselves are farthest (DivPrune, Alvar et al.
    2025, arXiv 2503.02175): greedily, by cosine distance. Our default begins with it too.
    """

    def pick(features: Tensor) -> Tensor:
        count = max(1, round(keep * len(features)))
        return farthest_first(cosines(features[None]), count)[0]

    return pick


def pooled(keep: float) -> Callable[[Any], Any]:
    """Means of the projector's input over a smaller grid."""

    def on(model: Any) -> Any:
        def image(pixels: Tensor) -> Image:
            encoder, _, known = find_encoder(model.model.vision_tower)
            states, prefix = _states(model, pixels), known.prefix_tokens_of(encoder)
            side = math.isqrt(len(states) - prefix)
            grid = states[prefix:].T.unflatten(1, (side, side))
            small = F.adaptive_avg_pool2d(grid, max(1, round(side * keep**0.5)))
            seen = torch.cat([states[:prefix], small.flatten(1).T])
            return _short(model, seen, small.shape[1], side)

        return _giving(model, image)

    return on


def _short(model: Any, states: Tensor, less: int, side: int) -> Image:
    """An image that gives these states [L', C], of a grid of `less` x `less` patches where it was
    one of `side` x `side`. Each has the place in the middle of what it shows.
    """
    features = _features(model, states[None])[0]
    first = len(features) - less * less
    middle = ((torch.arange(less) + 0.5) * side / less).long()
    places = torch.cat([torch.arange(first), (middle[:, None] * side + middle).flatten() + first])
    return Image(features, places, first + side * side)


def smaller(keep: float) -> Callable[[Any], Any]:
    """The image itself with fewer pixels, and so fewer patches."""

    @contextmanager
    def on(model: Any) -> Iterator[Calls]:
        config = model.config.vision_config
        patch = int(config.patch_size)

        def image(pixels: Tensor) -> Image:
            side = pixels.shape[-1] // patch
            less = max(1, round(side * keep**0.5))
            with on_smaller_images(model.model.vision_tower, less * patch):
                states = _states(model, pixels)
            return _short(model, states, less, side)

        with _giving(model, image) as calls:
            yield calls

    return on


def merged(**fields: Any) -> Callable[[Any], Any]:
    """MaMe behind the tower."""

    @contextmanager
    def on(model: Any) -> Iterator[Calls]:
        handle = apply_captioner(model, **fields)
        try:
            calls = calls_on(model)
            assert calls is not None
            yield calls
        finally:
            handle.remove()

    return on


class Renumbered(Calls):
    """Tokens that are left are counted from 0, as of a shorter prompt: the paper's form."""

    def fewer(self, call: dict[str, Any], images: list[Image]) -> Fewer:
        """As `Calls` has it, without the places of what is gone."""
        found = super().fewer(call, images)
        if found.lost.real is None:
            return found
        real, before = found.lost.real, found.lost.after
        lost = replace(found.lost, after=real.sum(1), shift=real.sum(1) - before)
        positions = (real.long().cumsum(1) - 1).clamp(min=0)
        return replace(found, call={**found.call, "position_ids": positions}, lost=lost)


def renumbered(row: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A row whose tokens are counted anew."""

    @contextmanager
    def on(model: Any) -> Iterator[Calls]:
        with row(model) as own:
            calls = Renumbered(model, own.seen)
            put(calls)
            try:
                yield calls
            finally:
                put(own)

    return on


def in_tower(make: Callable[[Any, int], Any]) -> Callable[[Any], Any]:
    """Tokens that merge in the tower's blocks, in the order of their places.

    Args:
        make: puts merging on a tower of which so many blocks are read, for a `with` block.
    """

    @contextmanager
    def on(model: Any) -> Iterator[Calls]:
        tower, count = model.model.vision_tower, layer_of(model)
        skip = int(model.config.vision_feature_select_strategy == "default")
        with make(tower, count) as handle:
            handle.capture()

            def image(pixels: Tensor) -> Image:
                states = _states(model, pixels)
                plans = [plan for n, plan in sorted(handle.plans().items()) if n < count]
                whole = _tokens_in(plans[0]) if plans else len(states)
                places = torch.arange(whole, device=states.device)
                for plan in plans:
                    places = places[_kept(plan)]
                order = places.argsort()
                features = _features(model, states[order][None])[0]
                return Image(features, places[order][skip:] - skip, whole - skip)

            with _giving(model, image) as calls:
                yield calls

    return on


def _kept(plan: Any) -> Tensor:
    """LongTensor [L'], the place of each token that a block left of one image: of several that a
    rival merged the first.
    """
    if not isinstance(plan, Traced):
        return plan.kept.expand(1, -1)[0]
    rows = plan.rows[0]
    first = rows.new_full((int(rows.max()) + 1,), len(rows))
    every = torch.arange(len(rows), device=rows.device)
    return first.scatter_reduce(0, rows, every, "amin")


def _tokens_in(plan: Any) -> int:
    return plan.rows.shape[1] if isinstance(plan, Traced) else plan.tokens_in


SHARES = (0.5, 0.25, 0.11)
PAPER = in_tower(lambda tower, count: mame(tower, tau=0.8, blocks=count))
_EVERY: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "baseline": ("baseline", chosen(everything)),
    "tome": ("ToMe, r = 8", in_tower(lambda tower, _: rival_on(tower, ToMe(8)))),
    "tau-0.8": ("MaMe, tau .8", merged(tau=0.8)),
    "plain-0.8": ("MaMe, paper's form, tau .8", renumbered(PAPER)),
    **{f"keep-{k}": (f"MaMe, keep {k}", merged(keep=k)) for k in SHARES},
    **{
        f"renumbered-{k}": (f"MaMe, keep {k}, renumbered", renumbered(merged(keep=k)))
        for k in SHARES
    },
    **{f"random-{k}": (f"random dropping, {k}", chosen(random_of(k))) for k in SHARES},
    **{f"pool-{k}": (f"pooling, {k}", pooled(k)) for k in SHARES},
    **{f"smaller-{k}": (f"smaller image, {k}", smaller(k)) for k in SHARES},
    **{f"divprune-{k}": (f"DivPrune, {k}", chosen(divprune_of(k))) for k in SHARES},
}
# a row's `method` puts it on a LLaVA for a `with` block
ROWS = {
    name: Row(name=name, label=label, method=method) for name, (label, method) in _EVERY.items()
}


def chosen_rows(text: str | None) -> list[str]:
    """Names of the baseline and of the rows named with commas between; None: all.

    Raises UserError for one that there isn't.
    """
    return list({"baseline": None, **named(text, ROWS)})
