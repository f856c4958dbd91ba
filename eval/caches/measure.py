"""One passage, every method: one prefill, then the text that follows read once for each method and
share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mame_sd.caches import CacheHandle, CacheView, Kept, compress_cache
from mame_sd.caches.layer import CompressedLayer
from mame_sd.upstream import with_cache

from ..tables import Row
from .rows import KVzip, scores_of
from .texts import Passage


class Recorder:
    """A method that keeps every key and remembers what it saw."""

    def __init__(self) -> None:
        self.views: list[CacheView] = []

    def look(self, view: CacheView, keep: float) -> CacheView:
        """The whole view, the layer's input too."""
        return view

    def lengths(
        self, views: Sequence[CacheView], looks: Sequence[CacheView], keep: float
    ) -> list[Tensor]:
        """Every key."""
        self.views = list(looks)
        return [view.counts() for view in views]

    def shorten(self, view: CacheView, look: CacheView, length: Tensor) -> Kept:
        """The cache as it is."""
        return Kept(view.keys, view.values, view.slots, view.bias, view.real)


class Meter:
    """Runs prompts on one model, inside `with`."""

    def __init__(self, model: Any, repeat: Sequence[int] = ()) -> None:
        """`repeat`: token ids that ask the model to repeat its prompt, for KVzip."""
        self.model, self.repeat, self.recorder = model, list(repeat), Recorder()
        self._context = compress_cache(model, 0.5, self.recorder)

    def __enter__(self) -> Meter:
        self.handle: CacheHandle = self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    @torch.no_grad()
    def prefill(self, prompt: Sequence[int], cache: DynamicCache | None = None) -> list[CacheView]:
        """Runs a prompt once, behind what a cache holds; gives the caches of all layers."""
        self.handle.compressing = True
        ids = torch.tensor([list(prompt)], device=self.model.device)
        kept = with_cache(self.model, DynamicCache() if cache is None else cache)
        self.model(ids, **kept, use_cache=True, logits_to_keep=1)
        self.handle.compressing = False
        return self.recorder.views

    @torch.no_grad()
    def rest(
        self, kept: Sequence[Kept], seen: int, ids: Sequence[int]
    ) -> tuple[Tensor, DynamicCache]:
        """Log-probabilities [n, V] in fp32 after each of `ids`, read after a cache; and the
        cache.
        """
        cache = cache_of(kept, seen)
        tokens = torch.tensor([list(ids)], device=self.model.device)
        out = self.model(tokens, **with_cache(self.model, cache), use_cache=True)
        return out.logits[0].float().log_softmax(-1), cache

    @torch.no_grad()
    def repeated(self, start: Sequence[CacheView], prompt: Sequence[int]) -> dict[int, Tensor]:
        """KVzip's scores [1, h, L] of each layer: the prompt is repeated once after itself."""
        length, found = start[0].seen, {}
        for view in self.prefill([*self.repeat, *prompt], cache_of(every_key(start), length)):
            queries, slots = view.newest()
            parts = [
                view.attention(queries[:, :, at], slots[at])[..., :length].amax((2, 3))
                for at in view.blocks(queries)
            ]
            found[view.layer] = torch.stack(parts).amax(0)
        return found


def every_key(views: Sequence[CacheView]) -> list[Kept]:
    """Every key of every layer."""
    return [Kept(v.keys, v.values, v.slots, v.bias, v.real) for v in views]


def cache_of(kept: Sequence[Kept], seen: int) -> DynamicCache:
    """A cache that holds what was kept of `seen` tokens."""
    cache = DynamicCache()
    cache.layers = [CompressedLayer(one, seen) for one in kept]
    return cache


def left(
    rows: Sequence[Row], shares: Sequence[float], done: Callable[[str, float], bool]
) -> list[tuple[Row, float]]:
    """Each row at each share that isn't `done`."""
    return [(row, s) for row in rows for s in shares if not done(row.name, s)]


@torch.no_grad()
def kept_by(
    meter: Meter, row: Row, share: float, start: Sequence[CacheView], prompt: Sequence[int]
) -> list[Kept]:
    """What a row keeps of all layers after the `prompt` that `start` saw."""
    scores = scores_of(row)
    if isinstance(scores, KVzip) and scores.views is not start:
        scores.views, scores.found = start, meter.repeated(start, prompt)
    return row.method.compress_all(start, share)


def measure_passage(
    meter: Meter,
    passage: Passage,
    rows: Sequence[Row],
    shares: Sequence[float],
    done: Callable[[str, float], bool],
) -> Iterator[dict[str, Any]]:
    """KL to the full cache and loss of what follows, of each row and share that isn't `done`.

    Yields:
        row, share, kl and nll (nats per token, means over the tokens that follow but the first),
        and the shares of keys ("kept") and of bytes ("bytes", with biases, slots and padding) that
        stayed.
    """
    todo = left(rows, shares, done)
    if not todo and done("full", 1.0):
        return
    start = meter.prefill(passage.prompt)
    target = torch.tensor(passage.rest[1:])
    full = every_key(start)
    seen = start[0].seen
    want, _ = meter.rest(full, seen, passage.rest[:-1])
    size = sum(k.keys.nbytes + k.values.nbytes for k in full)
    chance = want.exp()
    if not done("full", 1.0):
        whole = {"kl": 0.0, "nll": _loss(want, target), "kept": 1.0, "bytes": 1.0}
        yield {"row": "full", "share": 1.0, **whole}
    for row, share in todo:
        kept = kept_by(meter, row, share, start, passage.prompt)
        got, _ = meter.rest(kept, seen, passage.rest[:-1])
        kl = float((chance * (want - got)).sum(-1).mean())
        counts = [
            k.keys.shape[2] if k.real is None else float(k.real.sum(-1).float().mean())
            for k in kept
        ]
        yield {
            "row": row.name,
            "share": share,
            "kl": kl,
            "nll": _loss(got, target),
            "kept": sum(counts) / len(counts) / seen,
            "bytes": sum(CompressedLayer(k, seen).nbytes for k in kept) / size,
        }


def _loss(log_probabilities: Tensor, target: Tensor) -> float:
    return -float(log_probabilities.cpu().gather(1, target.unsqueeze(1)).mean())
