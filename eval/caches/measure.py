"""Measure every method on one passage: one prefill, then the rest for each method and share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mame_sd.caches import CacheHandle, CacheView, Kept, Selection, compress_cache
from mame_sd.caches.layer import CompressedLayer
from mame_sd.compat import with_cache

from .cases import Case
from .methods import KVzip

FULL = "full", 1.0  # the row of the full cache


class Recorder(Selection):
    """A method that keeps every key and records what it saw."""

    views: Sequence[CacheView] = ()

    def score_layer(self, view: CacheView, keep: float) -> Any:
        """Return the view with the layer's input."""
        return view

    def lengths(self, views: Sequence[CacheView], scored: Sequence[Any], keep: float) -> Tensor:
        """Keep every key."""
        self.views = scored
        return torch.stack([view.counts() for view in views])

    def shorten(self, view: CacheView, layer: Any, length: Tensor) -> Kept:
        """Leave the cache as it is."""
        return view


class Meter:
    """Run prompts on one model inside a `with` block.

    Args:
        model: the language model.
        repeat: token ids that ask the model to repeat its prompt, for KVzip.
    """

    def __init__(self, model: Any, repeat: Sequence[int] = ()) -> None:
        self.model, self.repeat, self.recorder = model, list(repeat), Recorder()
        self._context = compress_cache(model, 0.5, self.recorder)

    def __enter__(self) -> Meter:
        self.handle: CacheHandle = self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def _call(self, ids: Sequence[int], cache: DynamicCache, **more: Any) -> Any:
        tokens = torch.tensor([list(ids)], device=self.model.device)
        return self.model(tokens, **with_cache(self.model, cache), use_cache=True, **more)

    @torch.no_grad()
    def prefill(
        self, prompt: Sequence[int], cache: DynamicCache | None = None
    ) -> Sequence[CacheView]:
        """Run a prompt once after the tokens of a cache; return the caches of all layers."""
        self.handle.keep = 0.5
        self._call(prompt, DynamicCache() if cache is None else cache, logits_to_keep=1)
        self.handle.keep = 1
        return self.recorder.views

    @torch.no_grad()
    def rest(self, kept: Sequence[Kept], seen: int, ids: Sequence[int]) -> Tensor:
        """Read tokens after a cache.

        Args:
            kept: what each layer keeps.
            seen: number of tokens that it stands for.
            ids: the tokens that follow.

        Returns:
            Log-probabilities after each of them, fp32 [n, V].
        """
        logits: Tensor = self._call(ids, cache_of(kept, seen)).logits[0]
        return logits.float().log_softmax(-1)

    @torch.no_grad()
    def repeated(self, prompt: Sequence[int], start: Sequence[CacheView]) -> list[Tensor]:
        """Return KVzip's scores [1, h, L] of each layer, from reading the prompt a second time."""
        length, scores = start[0].seen, []
        for view in self.prefill([*self.repeat, *prompt], cache_of(start, length)):
            queries, slots = view.newest_queries()
            parts = [
                view.attention(queries[:, :, at], slots[at])[..., :length].amax((2, 3))
                for at in view.blocks(queries)
            ]
            scores.append(torch.stack(parts).amax(0))
        return scores


def cache_of(kept: Sequence[Kept], seen: int) -> DynamicCache:
    """Return a cache of what was kept of `seen` tokens."""
    cache = DynamicCache()
    cache.layers = [CompressedLayer(one, seen) for one in kept]
    return cache


def measure(
    meter: Meter, methods: Mapping[str, Any], case: Case, missing: Sequence[tuple[str, float]]
) -> Iterator[tuple[tuple[str, float], dict[str, Any]]]:
    """Measure rows with their shares of the cache on one case; `FULL` is the full cache.

    Args:
        meter: runs prompts.
        methods: the methods by name of the row.
        case: the case.
        missing: names of rows, and shares of the cache.

    Yields:
        A row and share with its result: "kl" to the full cache and "nll" of what follows (nats per
        token, means over all tokens but the first), and the shares of keys ("kept") and of bytes
        ("bytes", with biases, slots and padding) that stayed.
    """
    for method in methods.values():
        if isinstance(method, KVzip):
            method.repeated = partial(meter.repeated, case.prompt)
    start = meter.prefill(case.prompt)
    seen, read = start[0].seen, case.rest[:-1]
    want = meter.rest(start, seen, read)
    target = torch.tensor(case.rest[1:], device=want.device)

    def figures(kept: Sequence[Kept]) -> dict[str, Any]:
        got = want if kept is start else meter.rest(kept, seen, read)
        counts = [float(one.real_keys().sum(-1).float().mean()) for one in kept]
        sizes = [
            sum(CompressedLayer(one, seen).nbytes for one in kept),
            sum(one.keys.nbytes + one.values.nbytes for one in start),
        ]
        return {
            "kl": float((want.exp() * (want - got)).sum(-1).mean()),
            "nll": -float(got.gather(1, target.unsqueeze(1)).mean()),
            "kept": sum(counts) / len(counts) / seen,
            "bytes": 1.0 if kept is start else sizes[0] / sizes[1],
        }

    for name, share in missing:
        if (name, share) == FULL:
            yield FULL, figures(start)
        else:
            with torch.no_grad():
                kept = methods[name].compress_all(start, share)
            yield (name, share), figures(kept)
