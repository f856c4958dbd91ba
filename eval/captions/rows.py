"""Rows of the caption table: which of an image's tokens the language model reads.

All rows go through the same calls of the model (`mame_sd.captions.calls`); a row says only which
vectors an image gives. Each image is seen alone, so that a row does not depend on a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mame_sd.captions.apply_captioner import apply_captioner
from mame_sd.captions.calls import Calls
from mame_sd.captions.farthest import cosines, farthest_first
from mame_sd.captions.known_captioners import images_of
from mame_sd.captions.on_model import put, take
from mame_sd.captions.prompts import Image

from ..tables import Row, named


@contextmanager
def chosen(pick: Callable[[Tensor, int], Tensor], keep: float, model: Any) -> Iterator[Calls]:
    """Give the language model a share `keep` of an image's tokens, in their order: `pick` takes so
    many places of features [L, C].
    """

    def some(image: Image) -> Image:
        count = max(1, round(keep * len(image.features)))
        places = pick(image.features, count).sort().values
        return Image(image.features[places], image.places[places], image.unmerged)

    calls = Calls(model, lambda call: [some(one) for one in images_of(model, call, 1.0)])
    put(calls)
    try:
        yield calls
    finally:
        take(model, calls)


def first(features: Tensor, count: int) -> Tensor:
    """Take the first ones."""
    return torch.arange(count, device=features.device)


def at_random(features: Tensor, count: int) -> Tensor:
    """Take some at random, as follows from the features alone."""
    data = features.detach().float().cpu().numpy().tobytes()
    seed = int.from_bytes(hashlib.sha256(data).digest()[:4], "big")
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))
    return order[:count].to(features.device)


def divprune(features: Tensor, count: int) -> Tensor:
    """Take those whose nearest neighbours among themselves are farthest (DivPrune, Alvar et al.
    2025, arXiv 2503.02175): greedily, by cosine distance. Our default begins with it too.
    """
    return farthest_first(cosines(features[None]), count)[0]


@contextmanager
def merged(model: Any, **fields: Any) -> Iterator[Calls]:
    """Merge behind the tower as `apply_mame` does with these fields."""
    handle = apply_captioner(model, **fields)
    try:
        yield handle
    finally:
        handle.remove()


SHARES = (0.5, 0.25, 0.11)
_EVERY: dict[str, tuple[str, Callable[[Any], AbstractContextManager[Calls]]]] = {
    "baseline": ("baseline", partial(chosen, first, 1.0)),
    **{f"keep-{k}": (f"MaMe, keep {k}", partial(merged, keep=k)) for k in SHARES},
    **{f"random-{k}": (f"random dropping, {k}", partial(chosen, at_random, k)) for k in SHARES},
    **{f"divprune-{k}": (f"DivPrune, {k}", partial(chosen, divprune, k)) for k in SHARES},
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
