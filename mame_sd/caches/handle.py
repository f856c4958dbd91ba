"""Shorten the KV cache of a model inside a `with` block, by hooks on its attention layers.

The block belongs to its thread (a context variable records it). Prompts that other threads give the
same model are refused unless they are in a block of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from mame_sd import compat
from mame_sd.caches.attention import Attention, attention_layers
from mame_sd.caches.layer import CompressedLayer
from mame_sd.caches.selection import ScoredLayer, Selection, token_bytes
from mame_sd.caches.view import CacheView
from mame_sd.report import LayerTokens, NothingMergedError, Report, counted

_RUNNING: ContextVar[tuple[CacheHandle, ...]] = ContextVar("_RUNNING", default=())


@dataclass(frozen=True)
class CacheReport(Report):
    """Keys and bytes of a cache before and after its last compression.

    Attributes:
        layers: keys seen and the mean number of keys per head that stayed, by compressed layer.
        bytes_before: bytes of these layers before.
        bytes_after: their bytes after.
        passed_by: indices of layers that aren't compressed because they attend to a window only.
    """

    layers: tuple[LayerTokens, ...]
    bytes_before: int
    bytes_after: int
    passed_by: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), **super().to_dict()}

    def __str__(self) -> str:
        if not self.layers:
            lines = ["nothing was compressed"]
        else:
            seen = max(layer.tokens_in for layer in self.layers)
            kept = sum(layer.tokens_kept for layer in self.layers) / len(self.layers)
            after, before = self.bytes_after / 2**20, self.bytes_before / 2**20
            lines = [
                f"{counted(len(self.layers), 'layer')}: {kept:.0f} of {seen} keys stay,"
                f" {after:.1f} of {before:.1f} MiB"
            ]
        if self.passed_by:
            lines.append(
                "not compressed, because they attend to a window only: layers"
                f" {', '.join(map(str, self.passed_by))}"
            )
        return "\n".join(lines)


@contextmanager
def compress_cache(
    model: nn.Module, keep: float = 0.25, method: Any = None
) -> Iterator[CacheHandle]:
    """Compress the KV cache of a transformers model while the `with` block runs.

    Caches that were made inside the block can only be used inside it.

    Args:
        model: a causal language model with rotary positions, attention `sdpa` or `eager`, and a
            dynamic cache.
        keep: share of the bytes that stays, in (0, 1]; 1 changes nothing. At least one key of each
            layer stays. Lower values save more memory and time, and move the model's answers
            further from those of the full cache.
        method: a function of a layer's `CacheView` that scores its keys, or a `Selection`. If None,
            the default.

    Yields:
        The handle, whose report says what stayed.

    Raises:
        TypeError: `model` isn't a transformers model, or `method` isn't a function.
        ValueError: `keep` is out of range, or the model, its attention or its cache can't be
            compressed.
        RuntimeError: the installed transformers lacks a name that this relies on, or another
            thread gives the model a prompt.
        NothingMergedError: the block ends, forwards of several tokens ran, and no layer was
            compressed.
    """
    compat.require("transformers")
    if not (method is None or callable(method) or isinstance(method, Selection)):
        raise TypeError(f"method: expected a function of a view, got {type(method).__name__}")
    chosen = method if isinstance(method, Selection) else Selection(method)
    every = attention_layers(model)
    config = getattr(model, "generation_config", None)
    cache = getattr(config, "cache_implementation", None)
    if cache not in (None, "dynamic"):
        raise ValueError(f"cache_implementation: expected a dynamic cache, got {cache!r}")
    if getattr(config, "prompt_lookup_num_tokens", None):
        raise ValueError(
            "prompt_lookup_num_tokens: expected none inside compress_cache, whose caches can't give"
            " tokens back, got it; generate without it"
        )
    if all(layer.sliding for layer in every):
        raise ValueError(
            "model: expected layers that attend to all tokens, got sliding windows only, whose"
            " caches are short already"
        )
    handle = CacheHandle(type(model).__name__, every, keep, chosen)
    _check_kind(model, handle._layers)
    running = _RUNNING.get()
    if any(one._live and one._layers.keys() & handle._layers.keys() for one in running):
        raise ValueError("model: its cache is compressed already; leave that compress_cache first")
    _RUNNING.set((*running, handle))
    try:
        handle._install()
        yield handle
        if handle._ran and not handle.report().layers:
            raise NothingMergedError(
                f"expected forwards to compress the cache, but {handle._ran} of several tokens ran"
                " and no layer was: give them use_cache=True and a DynamicCache, or leave out"
                " compress_cache"
            )
    finally:
        handle._remove()
        _RUNNING.set(tuple(other for other in _RUNNING.get() if other is not handle))


def _check_kind(model: nn.Module, layers: dict[int, Attention]) -> None:
    """Raise ValueError for a model whose own cache holds more than keys and values in a layer."""
    made = DynamicCache(config=model.config).layers
    for layer in layers.values():
        kind = type(made[layer.index]) if layer.index < len(made) else DynamicLayer
        if kind is not DynamicLayer:
            raise ValueError(
                "model: expected layers that cache only keys and values, got"
                f" {type(model).__name__} with a {kind.__name__}; leave compress_cache out"
            )


@dataclass
class _Forward:
    """One forward of a model on one cache."""

    mask: Tensor | None  # the model's own, over all tokens seen
    # Layers that wait for the others, by index.
    waiting: dict[int, tuple[CacheView, ScoredLayer]] = field(default_factory=dict)


class _Hook:
    """A hook on one layer of a model; on copies of the model it does nothing.

    If another thread adds or removes a hook during a forward, torch omits the keyword arguments, so
    that there are fewer than `count`. The call belongs to no block of ours then and is ignored.
    """

    def __init__(self, call: Any = None, count: int = 0) -> None:
        self.call, self.count = call, count

    def __call__(self, *args: Any) -> Any:
        return self.call(*args) if len(args) == self.count else None

    def __reduce__(self) -> Any:
        return _Hook, ()


class CacheHandle:
    """The hooks of one `compress_cache` block, with the share that it keeps and its report.

    Args:
        name: the model's class.
        every: its attention layers; those with a sliding window are not compressed.
        keep: share of the bytes that stays.
        method: chooses keys and fits their values.
    """

    def __init__(self, name: str, every: list[Attention], keep: float, method: Selection) -> None:
        self.keep, self._name, self._method = keep, name, method
        self._layers = {id(layer.module): layer for layer in every if not layer.sliding}
        modules = list(self._layers)
        self._first, self._last = modules[0], modules[-1]
        passed_by = tuple(layer.index for layer in every if layer.sliding)
        self._report = CacheReport((), 0, 0, passed_by)
        self._forwards: WeakKeyDictionary[Cache, _Forward] = WeakKeyDictionary()
        self._hooks: list[Any] = []
        self._live = True
        self._ran = 0  # forwards of several tokens

    @property
    def keep(self) -> float:
        """Return the share of the bytes that stays.

        A new value applies to later prompts; 1 leaves their caches as they are.
        """
        return self._keep

    @keep.setter
    def keep(self, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise ValueError(f"keep: expected a share above 0 and at most 1, got {value!r}")
        self._keep = float(value)

    def report(self) -> CacheReport:
        """Return the keys and bytes of the last compression."""
        return self._report

    def _install(self) -> None:
        for layer in self._layers.values():
            before, after = _Hook(self._before, 3), _Hook(self._after, 4)
            self._hooks.append(layer.module.register_forward_pre_hook(before, with_kwargs=True))
            self._hooks.append(layer.module.register_forward_hook(after, with_kwargs=True))

    def _remove(self) -> None:
        self._live = False
        for hook in self._hooks:
            hook.remove()

    def _acts(self) -> bool:
        return self._live and any(one is self for one in _RUNNING.get())

    def _refuse(self, module: Any, tokens: int) -> None:
        """Raise RuntimeError for a prompt from a thread that has no block on this model."""
        others = any(one._live and id(module) in one._layers for one in _RUNNING.get())
        if self._live and tokens > 1 and not others and self.keep < 1:
            raise RuntimeError(
                "expected prompts from a thread whose own compress_cache block is open, got one"
                f" from another while one compresses caches of this {self._name}: enter a block in"
                " each thread, or start it by contextvars.copy_context().run"
            )

    def _before(
        self, module: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Give a compressed layer the mask of the keys that it still holds."""
        cache, hidden = compat.cache_in(kwargs), _input_of(args, kwargs)
        if cache is None:
            return None
        if not self._acts():
            self._refuse(module, hidden.shape[1])
            return None
        mask = kwargs.get("attention_mask")
        if id(module) == self._first:
            self._forwards[cache] = _Forward(mask)
        layer = _layer_of(cache, module.layer_idx, self.keep < 1)
        if isinstance(layer, CompressedLayer) and layer.compressed:
            heads = module.config.num_attention_heads
            kwargs["attention_mask"] = layer.mask(mask, hidden.shape[1], heads, hidden.dtype)
        return args, kwargs

    @torch.no_grad()
    def _after(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Score a layer's keys after several tokens; compress all layers after the last one."""
        cache, hidden = compat.cache_in(kwargs), _input_of(args, kwargs)
        if not self._acts() or self.keep == 1 or hidden.shape[1] == 1:
            return
        self._ran += id(module) == self._first
        layer = None if cache is None else _layer_of(cache, module.layer_idx)
        if layer is None:
            return
        forward = self._forwards[cache]
        view = _view(self._layers[id(module)], layer, hidden, forward.mask, kwargs)
        scored_layer = self._method.score_layer(view, self.keep)
        # An empty tensor releases the layer's input, which a slice of it would keep.
        empty = hidden.new_empty(hidden.shape[0], 0, hidden.shape[2])
        forward.waiting[view.layer] = replace(view, hidden_states=empty), scored_layer
        if id(module) == self._last:
            self._shorten(cache, self._forwards.pop(cache).waiting)

    def _shorten(self, cache: Cache, waiting: dict[int, tuple[CacheView, ScoredLayer]]) -> None:
        """Compress all layers one by one, and release the full cache of each."""
        views, scored = zip(*waiting.values(), strict=True)
        lengths = self._method.lengths(views, scored, self.keep)
        del views, scored
        layers, before, after = [], 0, 0
        for index, length in zip(list(waiting), lengths, strict=True):
            view, scored_layer = waiting.pop(index)
            kept = self._method.shorten(view, scored_layer, length.to(view.keys.device))
            layer = cache.layers[index] = CompressedLayer(kept, view.seen)
            stay = float(kept.real_keys().sum() / kept.slots[..., 0].numel())
            layers.append(LayerTokens(name=f"layer {index}", tokens_in=view.seen, tokens_kept=stay))
            before += token_bytes(view) * view.seen * view.keys.shape[0]
            after += layer.nbytes
        passed_by = self._report.passed_by
        self._report = CacheReport(tuple(layers), before, after, passed_by)


def _view(
    attention: Attention,
    layer: DynamicLayer,
    hidden: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> CacheView:
    module, (b, h, n, _) = attention.module, layer.keys.shape
    if isinstance(layer, CompressedLayer) and layer.compressed:
        slots, bias, real = layer.slots.long(), layer.bias, layer.real
    else:
        slots = torch.arange(n, device=layer.keys.device).expand(b, h, n)
        bias = real = None
    seen = layer.get_seq_length()
    tokens = _real_tokens(mask, b, seen).to(slots.device)
    if not bool(tokens.all()):
        seen_keys = tokens.unsqueeze(1).expand(-1, h, -1).gather(2, slots)
        real = seen_keys if real is None else real & seen_keys
    return CacheView(
        keys=layer.keys,
        values=layer.values,
        hidden_states=hidden,
        slots=slots,
        seen=seen,
        scale=float(module.scaling),
        project=attention.project,
        rotate=attention.rotate,
        next=_next(kwargs.get("position_ids"), tokens),
        tokens=tokens,
        bias=bias,
        real=real,
        softcap=getattr(module, "attn_logit_softcapping", None),
        layer=attention.index,
    )


def _real_tokens(mask: Tensor | None, samples: int, tokens: int) -> Tensor:
    """Return the tokens, bool [B, N], that the newest token attends to under a mask [B, 1, Q, N].

    A sample that consists of padding counts as tokens, so that what is kept of it is finite.
    """
    if mask is None:
        return torch.ones(samples, tokens, dtype=torch.bool, device="cpu")
    last = mask[:, 0, -1]
    seen = last if last.dtype == torch.bool else last > torch.finfo(last.dtype).min / 2
    return (seen | ~seen.any(1, keepdim=True)).expand(samples, -1)


def _next(positions: Tensor | None, tokens: Tensor) -> Tensor:
    """Return the position after the newest token that isn't padding, LongTensor [B]."""
    if positions is None or positions.dim() != 2:
        return tokens.sum(1)
    positions = positions.to(tokens.device).expand(len(tokens), -1)
    return positions.masked_fill(~tokens[:, -positions.shape[1] :], -1).amax(1) + 1


def _input_of(args: Any, kwargs: dict[str, Any]) -> Tensor:
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _layer_of(cache: Cache, index: int, compressing: bool = True) -> Any:
    """Return one layer of a cache, or None; if `compressing`, refuse unknown kinds of caches."""
    layers, name = getattr(cache, "layers", None), type(cache).__name__
    if layers is None:
        raise ValueError(f"cache: expected a DynamicCache, got {name}")
    if compressing and getattr(cache, "offloading", False):
        raise ValueError(
            f"cache: expected one that stays on its device, got {name}(offloading=True); leave"
            " offloading out"
        )
    layer = layers[index] if index < len(layers) else None
    if compressing and type(layer) not in (type(None), DynamicLayer, CompressedLayer):
        raise ValueError(
            "cache: expected a DynamicCache of layers that cache only keys and values, got"
            f" {name} with a {type(layer).__name__}; leave cache_implementation or compress_cache"
            " out"
        )
    return layer
