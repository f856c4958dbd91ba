"""Rows of the caption table: what becomes of an image's tokens between tower and language model.

All rows go through the same calls of the model (`mame_sd.captions.calls`); a row says only which
vectors an image gives. Each image is seen alone, so that a row does not depend on a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mame_sd.apply import mame
from mame_sd.captions.apply_captioner import apply_captioner
from mame_sd.captions.calls import Calls, Lost
from mame_sd.captions.farthest import cosines, farthest_first
from mame_sd.captions.known_captioners import layer_of
from mame_sd.captions.on_model import calls_on, put, take
from mame_sd.captions.prompts import Image

from ..perception.rivals import Traced, rival_on
from ..perception.rules import ToMe
from ..tables import Row, named


def _states(model: Any, pixels: Tensor) -> Tensor:
    """Tokens [L, C] that the projector is given of pixels [1, 3, h, w], prefix ones included."""
    output = model.model.vision_tower(pixels, output_hidden_states=True, return_dict=True)
    states: Tensor = output.hidden_states[layer_of(model)][0]
    return states


def _features(model: Any, states: Tensor) -> Tensor:
    """Projected features [L', C] of such tokens, without those that the model leaves out."""
    skip = int(model.config.vision_feature_select_strategy == "default")
    features: Tensor = model.model.multi_modal_projector(states[None, skip:])[0]
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


def chosen(
    pick: Callable[[Tensor, int], Tensor], keep: float = 1.0
) -> Callable[[Any], AbstractContextManager[Calls]]:
    """A share of the model's own visual tokens, in their order; `pick` gives so many places of
    features [L, C].
    """

    def on(model: Any) -> AbstractContextManager[Calls]:
        def image(pixels: Tensor) -> Image:
            features = _features(model, _states(model, pixels))
            count = max(1, round(keep * len(features)))
            places = pick(features, count).sort().values
            return Image(features[places], places, len(features))

        return _giving(model, image)

    return on


def first(features: Tensor, count: int) -> Tensor:
    """The first ones."""
    return torch.arange(count, device=features.device)


def at_random(features: Tensor, count: int) -> Tensor:
    """Some at random; which follows from the features alone."""
    data = features.detach().float().cpu().numpy().tobytes()
    seed = int.from_bytes(hashlib.sha256(data).digest()[:4], "big")
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))
    return order[:count].to(features.device)


def divprune(features: Tensor, count: int) -> Tensor:
    """Those whose nearest neighbours among themselves are farthest (DivPrune, Alvar et al. 2025,
    arXiv 2503.02175): greedily, by cosine distance. Our default begins with it too.
    """
    return farthest_first(cosines(features[None]), count)[0]


@contextmanager
def merged(model: Any, **fields: Any) -> Iterator[Calls]:
    """MaMe behind the tower."""
    handle = apply_captioner(model, **fields)
    try:
        calls = calls_on(model)
        assert calls is not None
        yield calls
    finally:
        handle.remove()


class Renumbered(Calls):
    """Tokens that are left are counted from 0, as of a shorter prompt: the paper's form."""

    def fewer(self, call: dict[str, Any], images: list[Image]) -> tuple[dict[str, Any], Lost]:
        """As `Calls` has it, without the places of what is gone."""
        call, lost = super().fewer(call, images)
        if lost.real is None:
            return call, lost
        count = lost.real.sum(1)
        positions = (lost.real.long().cumsum(1) - 1).clamp(min=0)
        lost = replace(lost, after=count, shift=count - lost.after)
        return {**call, "position_ids": positions}, lost


@contextmanager
def renumbered(row: Callable[[Any], AbstractContextManager[Calls]], model: Any) -> Iterator[Calls]:
    """A row whose tokens are counted anew."""
    with row(model) as own:
        calls = Renumbered(model, own.seen)
        put(calls)
        try:
            yield calls
        finally:
            put(own)


@contextmanager
def in_tower(make: Callable[[Any, int], Any], model: Any) -> Iterator[Calls]:
    """Tokens that merge in the tower's blocks, in the order of their places.

    Args:
        make: puts merging on a tower of which so many blocks are read, for a `with` block.
    """
    count = layer_of(model)
    skip = int(model.config.vision_feature_select_strategy == "default")
    with make(model.model.vision_tower, count) as handle:
        handle.capture()

        def image(pixels: Tensor) -> Image:
            states = _states(model, pixels)
            plans = [plan for n, plan in sorted(handle.plans().items()) if n < count]
            whole = _tokens_in(plans[0]) if plans else len(states)
            places = torch.arange(whole, device=states.device)
            for plan in plans:
                places = places[_kept(plan)]
            order = places.argsort()
            features = _features(model, states[order])
            return Image(features, places[order][skip:] - skip, whole - skip)

        with _giving(model, image) as calls:
            yield calls


def _kept(plan: Any) -> Tensor:
    """LongTensor [L'], the place of each token that a block left of one image: of several that a
    rival merged the first.
    """
    if not isinstance(plan, Traced):
        return plan.kept.expand(1, -1)[0]
    rows = plan.rows[0]
    found = rows.new_full((int(rows.max()) + 1,), len(rows))
    every = torch.arange(len(rows), device=rows.device)
    return found.scatter_reduce(0, rows, every, "amin")


def _tokens_in(plan: Any) -> int:
    return plan.rows.shape[1] if isinstance(plan, Traced) else plan.tokens_in


SHARES = (0.5, 0.25, 0.11)
_TOME = partial(in_tower, lambda tower, _: rival_on(tower, ToMe(8)))
_PAPER = partial(in_tower, lambda tower, count: mame(tower, tau=0.8, blocks=count))
_EVERY: dict[str, tuple[str, Callable[[Any], AbstractContextManager[Calls]]]] = {
    "baseline": ("baseline", chosen(first)),
    "tome": ("ToMe, r = 8", _TOME),
    "tau-0.8": ("MaMe, tau .8", partial(merged, tau=0.8)),
    "plain-0.8": ("MaMe, paper's form, tau .8", partial(renumbered, _PAPER)),
    **{f"keep-{k}": (f"MaMe, keep {k}", partial(merged, keep=k)) for k in SHARES},
    **{f"random-{k}": (f"random dropping, {k}", chosen(at_random, k)) for k in SHARES},
    **{f"divprune-{k}": (f"DivPrune, {k}", chosen(divprune, k)) for k in SHARES},
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
