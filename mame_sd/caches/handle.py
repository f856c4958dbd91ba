"""merge_cache: a shorter KV cache while a block runs.

    with merge_cache(model, keep=0.25) as handle:
        model.generate(**inputs, max_new_tokens=64)
    print(handle.report())

After each forward of several tokens (a prompt, or a chunk of one) the cache is cut to a share of
the tokens seen. With `every` also after so many single ones. Later tokens keep the positions of the
full sequence. Works by hooks on the attention layers: weights, configs and generation stay as they
are, and leaving the block takes all of it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from mame_sd import upstream
from mame_sd.caches.attention import (
    attention_layers,
    is_sliding,
    queries_of,
    real_tokens,
    rotated,
    rotation_of,
)
from mame_sd.caches.kept import Kept
from mame_sd.caches.layer import MergedLayer
from mame_sd.caches.presets import Method, method_of
from mame_sd.caches.view import CacheView
from mame_sd.report import NothingMergedError

_MARK = "_mame_cache"  # attribute of a model whose cache is being merged


@dataclass
class CacheHandle:
    """What `merge_cache` did.

    Attributes:
        keep: share of the tokens that stays.
        compressing: set it to False, and caches stay as they are, as when a text is scored after a
            prompt.
        layers: numbers of the layers that are compressed.
        passed_by: numbers of those that see a window alone and are left as they are.
        tokens: of each compressed layer, tokens seen and keys that stayed on average over heads, at
            the last compression.
        bytes: of each compressed layer, before and after the last compression.
    """

    keep: float
    compressing: bool = True
    layers: tuple[int, ...] = ()
    passed_by: tuple[int, ...] = ()
    tokens: dict[int, tuple[int, float]] = field(default_factory=dict)
    bytes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def report(self) -> str:
        """One line on what stayed, and one on layers that were passed by."""
        if not self.tokens:
            lines = [f"keep={self.keep}: nothing was compressed"]
        else:
            seen = max(s for s, _ in self.tokens.values())
            kept = sum(k for _, k in self.tokens.values()) / len(self.tokens)
            before, after = (sum(b[i] for b in self.bytes.values()) for i in (0, 1))
            lines = [
                f"{len(self.tokens)} layers: {kept:.0f} of {seen} keys stay, {after / 2**20:.1f} of"
                f" {before / 2**20:.1f} MiB"
            ]
        if self.passed_by:
            lines.append(
                "passed by, for they see a window alone: layers"
                f" {', '.join(map(str, self.passed_by))}"
            )
        return "\n".join(lines)


@contextmanager
def merge_cache(
    model: nn.Module, keep: float = 0.5, method: Any = "default", *, every: int | None = None
) -> Iterator[CacheHandle]:
    """Compresses the KV cache of a transformers model while the block runs.

    Caches that were made inside can be used inside alone.

    Args:
        model: a causal language model with rotary positions, attention `sdpa` or `eager`, and a
            dynamic cache.
        keep: share of the tokens seen that stays, above 0, at most 1; with 1 nothing is touched.
            Lower saves more memory and time, and moves the model's answers further from those of
            the full cache.
        method: a name (`mame_sd.caches.METHODS`), or an object with `score`
            (`mame_sd.caches.scores`) or `compress`.
        every: compress also after so many single tokens. None: prompts and chunks alone.

    Raises:
        TypeError: no transformers model, or no method.
        ValueError: `keep` or `every` out of range, an unknown method, or a model, attention or
            cache that can't be merged.
        RuntimeError: the installed transformers lacks a name that this relies on.
        NothingMergedError: the block ends, forwards of several tokens ran, and no layer was
            compressed.
    """
    upstream.require()
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise ValueError(f"keep: expected a share above 0 and at most 1, got {keep!r}")
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise ValueError(f"every: expected a number of tokens, at least 1, or None, got {every!r}")
    chosen, modules = method_of(method), attention_layers(model)
    if hasattr(model, _MARK):
        raise ValueError("model: its cache is merged already; leave that merge_cache first")
    cache = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if cache not in (None, "dynamic"):
        raise ValueError(f"cache_implementation: expected a dynamic cache, got {cache!r}")
    passed = tuple(m.layer_idx for m in modules if is_sliding(m))
    modules = [m for m in modules if not is_sliding(m)]
    if not modules:
        raise ValueError(
            "model: every layer sees a sliding window alone, whose cache is short as it is"
        )
    handle = CacheHandle(float(keep), layers=tuple(m.layer_idx for m in modules), passed_by=passed)
    if keep == 1:
        yield handle
        return
    work = _Work(model, modules, chosen, handle, every)
    setattr(model, _MARK, True)
    try:
        work.install()
        yield handle
        if work.forwards and not handle.tokens:
            raise NothingMergedError(
                f"expected forwards to compress the cache, but {work.forwards} of several tokens"
                " ran and no layer was: give them use_cache=True and a DynamicCache, or leave out"
                " merge_cache"
            )
    finally:
        delattr(model, _MARK)
        work.remove()


class _Work:
    """The hooks of one `merge_cache`."""

    def __init__(
        self,
        model: nn.Module,
        modules: list[Any],
        method: Method,
        handle: CacheHandle,
        every: int | None,
    ) -> None:
        self.modules, self.method, self.handle, self.every = modules, method, handle, every
        self.all_layers = bool(getattr(method, "all_layers", False))
        self.window: int | None = getattr(method, "window", None)
        self.rotations = {m.layer_idx: rotation_of(model, m) for m in modules}
        self.masks: dict[Any, Tensor | None] = {}  # of each layer, which tokens are real
        self.views: dict[Any, CacheView] = {}  # of layers that wait for the others
        self.hooks: list[Any] = []
        self.forwards = 0  # of several tokens

    def install(self) -> None:
        for module in self.modules:
            self.hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self.hooks.append(module.register_forward_hook(self._after, with_kwargs=True))

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _before(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Gives a layer that was compressed the mask of what it still holds."""
        cache, mask = upstream.cache_in(kwargs), kwargs.get("attention_mask")
        if cache is None:
            return args, kwargs
        self.masks[module.layer_idx] = real_tokens(mask)
        layer = _layer_of(cache, module.layer_idx)
        if isinstance(layer, MergedLayer) and layer.seen:
            hidden = _input_of(args, kwargs)
            heads = module.config.num_attention_heads
            kwargs["attention_mask"] = layer.mask(mask, hidden.shape[1], heads, hidden.dtype)
        return args, kwargs

    @torch.no_grad()
    def _after(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Compresses a layer after several tokens, or after `every` single ones."""
        cache = upstream.cache_in(kwargs)
        if not self.handle.compressing:
            return
        index, hidden = module.layer_idx, _input_of(args, kwargs)
        layer = None if cache is None else _checked(cache, index)
        self.forwards += module is self.modules[0] and hidden.shape[1] > 1
        if layer is None:
            return
        if hidden.shape[1] == 1:
            gathered = self._gathered(cache, layer, index, hidden)
            if gathered is None:
                return
            hidden = gathered
        layer = cache.layers[index]
        cos, sin = (t.expand(hidden.shape[0], -1, -1) for t in kwargs["position_embeddings"])
        view = self._view(module, layer, hidden, cos, sin)
        if not self.all_layers:
            self._put(cache, index, view, self.method.compress(view, self.handle.keep))
            return
        self.views[index] = view
        if module is self.modules[-1]:
            views, self.views = self.views, {}
            kept = self.method.compress_all(list(views.values()), self.handle.keep)  # type: ignore[attr-defined]
            for (number, one), short in zip(views.items(), kept, strict=True):
                self._put(cache, number, one, short)

    def _gathered(
        self, cache: Cache, layer: DynamicLayer, index: int, hidden: Tensor
    ) -> Tensor | None:
        """The inputs [B, n, C] of the single tokens since the last compression, when there are
        `every` of them.
        """
        if self.every is None:
            return None
        if not isinstance(layer, MergedLayer):
            b, h, n, _ = layer.keys.shape
            slots = torch.arange(n, device=layer.keys.device).expand(b, h, n)
            layer = cache.layers[index] = MergedLayer(Kept(layer.keys, layer.values, slots), n)
        before = layer.pending
        layer.pending = hidden if before is None else torch.cat([before, hidden], 1)
        return layer.pending if layer.pending.shape[1] >= self.every else None

    def _view(
        self, module: Any, layer: DynamicLayer, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> CacheView:
        keys, rotate = layer.keys, self.rotations[module.layer_idx]
        b, h, n, _ = keys.shape
        seen = layer.get_seq_length()
        if isinstance(layer, MergedLayer):
            slots, bias, real = layer.slots_now(), layer.bias_now(), layer.real_now()
        else:
            slots, bias, real = torch.arange(n, device=keys.device).expand(b, h, n), None, None
        tokens = self.masks.pop(module.layer_idx, None)
        if tokens is None or tokens.shape[0] != b:
            pads = torch.zeros(b, dtype=torch.long, device=keys.device)
        else:
            pads = (~tokens).sum(1)
            seen_keys = tokens.unsqueeze(1).expand(-1, h, -1).gather(2, slots)
            real = seen_keys if real is None else real & seen_keys
        if self.window is not None:
            hidden = hidden[:, -self.window :]
        plain = queries_of(module, hidden)
        if cos.shape[1] >= plain.shape[2]:
            queries = rotated(module, plain, cos[:, -plain.shape[2] :], sin[:, -plain.shape[2] :])
        else:  # single tokens that were gathered
            places = torch.arange(seen - plain.shape[2], seen, device=keys.device) - pads.unsqueeze(
                1
            )
            queries = rotate(plain, places)
        return CacheView(
            keys=keys,
            values=layer.values,
            queries=queries,
            plain_queries=plain,
            hidden_states=hidden,
            slots=slots,
            seen=seen,
            scale=float(module.scaling),
            pads=pads,
            rotate=rotate,
            bias=bias,
            real=real,
            softcap=getattr(module, "attn_logit_softcapping", None),
            layer=module.layer_idx,
            layers=len(self.modules),
        )

    def _put(self, cache: Cache, index: int, view: CacheView, kept: Kept) -> None:
        layer = MergedLayer(kept, view.seen)
        cache.layers[index] = layer
        heads = kept.keys.shape[1] * kept.keys.shape[0]
        count = kept.keys.shape[2] if kept.real is None else float(kept.real.sum()) / heads
        self.handle.tokens[index] = view.seen, count
        full = (
            view.seen
            * (view.keys.shape[-1] + view.values.shape[-1])
            * view.keys.element_size()
            * heads
        )
        self.handle.bytes[index] = full, layer.nbytes


def _input_of(args: Any, kwargs: dict[str, Any]) -> Tensor:
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _layer_of(cache: Cache, index: int) -> Any:
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise ValueError(f"cache: expected a DynamicCache, got {type(cache).__name__}")
    return layers[index] if index < len(layers) else None


def _checked(cache: Cache, index: int) -> DynamicLayer:
    """A layer of a cache that can be compressed."""
    layer = _layer_of(cache, index)
    if type(layer) not in (DynamicLayer, MergedLayer):
        raise ValueError(
            f"cache: expected a DynamicCache, got {type(cache).__name__} with a"
            f" {type(layer).__name__}; leave cache_implementation out"
        )
    return layer
