"""compress_cache: a shorter KV cache while a block runs, by hooks on the attention layers.

The block is one of its thread (a context variable tells). Prompts of other threads on the same
model are refused, unless they enter a block of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from mame_sd import upstream
from mame_sd.caches.attention import Attention, attention_layers
from mame_sd.caches.layer import CompressedLayer
from mame_sd.caches.selection import Method, full_price_of, method_of
from mame_sd.caches.view import CacheView
from mame_sd.report import NothingMergedError, counted

_RUNNING: ContextVar[tuple[_Work, ...]] = ContextVar("_RUNNING", default=())


@dataclass
class CacheHandle:
    """What `compress_cache` did.

    Attributes:
        keep: share of the bytes that stays.
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
        """Say in one line what stayed, and in a second which layers were passed by."""
        if not self.tokens:
            lines = [f"keep={self.keep}: nothing was compressed"]
        else:
            seen = max(s for s, _ in self.tokens.values())
            kept = sum(k for _, k in self.tokens.values()) / len(self.tokens)
            before, after = (sum(b[i] for b in self.bytes.values()) for i in (0, 1))
            lines = [
                f"{counted(len(self.tokens), 'layer')}: {kept:.0f} of {seen} keys stay,"
                f" {after / 2**20:.1f} of {before / 2**20:.1f} MiB"
            ]
        if self.passed_by:
            lines.append(
                "passed by, for they see a window alone: layers"
                f" {', '.join(map(str, self.passed_by))}"
            )
        return "\n".join(lines)


@contextmanager
def compress_cache(
    model: nn.Module, keep: float = 0.25, method: Any = None
) -> Iterator[CacheHandle]:
    """Compresses the KV cache of a transformers model while the block runs.

    Caches that were made inside can be used inside alone.

    Args:
        model: a causal language model with rotary positions, attention `sdpa` or `eager`, and a
            dynamic cache.
        keep: share of the bytes that stays, above 0, at most 1; with 1 nothing is touched. At least
            one key of each layer stays. Lower saves more memory and time, and moves the model's
            answers further from those of the full cache.
        method: an object with `score` (`mame_sd.caches.scores`) or a `Method`; None: the default.

    Raises:
        TypeError: no transformers model, or no method.
        ValueError: `keep` out of range, or a model, attention or cache that can't be
            compressed.
        RuntimeError: the installed transformers lacks a name that this relies on, or another thread
            than the block's gives the model a prompt.
        NothingMergedError: the block ends, forwards of several tokens ran, and no layer was
            compressed.
    """
    upstream.require("transformers")
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise ValueError(f"keep: expected a share above 0 and at most 1, got {keep!r}")
    chosen, layers = method_of(method), attention_layers(model)
    config = getattr(model, "generation_config", None)
    cache = getattr(config, "cache_implementation", None)
    if cache not in (None, "dynamic"):
        raise ValueError(f"cache_implementation: expected a dynamic cache, got {cache!r}")
    if getattr(config, "prompt_lookup_num_tokens", None):
        raise ValueError(_ASSISTED)
    passed = tuple(layer.index for layer in layers if layer.sliding)
    layers = [layer for layer in layers if not layer.sliding]
    if not layers:
        raise ValueError(
            "model: every layer sees a sliding window alone, whose cache is short as it is"
        )
    running = _RUNNING.get()
    if any(work.live and work.layers.keys() & {id(x.module) for x in layers} for work in running):
        raise ValueError("model: its cache is compressed already; leave that compress_cache first")
    handle = CacheHandle(float(keep), layers=tuple(x.index for x in layers), passed_by=passed)
    if keep == 1:
        yield handle
        return
    work = _Work(type(model).__name__, layers, chosen, handle)
    _RUNNING.set((*running, work))
    try:
        work.install()
        yield handle
        work.check()
    finally:
        work.remove()
        _RUNNING.set(tuple(other for other in _RUNNING.get() if other is not work))


_ASSISTED = (
    "assistant_model, prompt_lookup_num_tokens: expected none inside compress_cache, whose caches"
    " can't give tokens back; generate without them"
)


@dataclass
class _Forward:
    """One forward of a model on one cache."""

    mask: Tensor | None = None  # the model's own, over all tokens seen
    views: dict[int, CacheView] = field(default_factory=dict)  # of layers that wait for the others
    looks: dict[int, Any] = field(default_factory=dict)


class _Hook:
    """A hook on a layer of the model that it was put on: copies of the model carry an idle one.

    Args:
        count: of its arguments, keywords among them. torch calls it without those where another
            thread puts it on or takes it off at that moment, and the call is none of its block.
    """

    def __init__(self, call: Any = None, count: int = 0) -> None:
        self.call, self.count = call, count

    def __call__(self, *args: Any) -> Any:
        return self.call(*args) if len(args) == self.count else None

    def __reduce__(self) -> Any:
        return _Hook, ()


class _Work:
    """The hooks of one `compress_cache`."""

    def __init__(
        self, name: str, layers: list[Attention], method: Method, handle: CacheHandle
    ) -> None:
        self.name = name
        self.layers = {id(layer.module): layer for layer in layers}
        self.first, self.last = layers[0].module, layers[-1].module
        self.method, self.handle = method, handle
        self.forwards: WeakKeyDictionary[Cache, _Forward] = WeakKeyDictionary()
        self.hooks: list[Any] = []
        self.live = True
        self.ran = 0  # forwards of several tokens

    def install(self) -> None:
        for layer in self.layers.values():
            before, after = _Hook(self._before, 3), _Hook(self._after, 4)
            self.hooks.append(layer.module.register_forward_pre_hook(before, with_kwargs=True))
            self.hooks.append(layer.module.register_forward_hook(after, with_kwargs=True))

    def remove(self) -> None:
        self.live = False
        for hook in self.hooks:
            hook.remove()

    def check(self) -> None:
        """Raise NothingMergedError where nothing was compressed and something should have been."""
        if self.ran and not self.handle.tokens:
            raise NothingMergedError(
                f"expected forwards to compress the cache, but {self.ran} of several tokens ran and"
                " no layer was: give them use_cache=True and a DynamicCache, or leave out"
                " compress_cache"
            )

    def _acts(self) -> bool:
        return self.live and any(work is self for work in _RUNNING.get())

    def _refuse(self, module: Any, tokens: int) -> None:
        """Raise RuntimeError for a prompt of a thread that is in no block on this model."""
        others = any(work.live and id(module) in work.layers for work in _RUNNING.get())
        if self.live and tokens > 1 and not others:
            raise RuntimeError(
                "expected prompts from a thread whose own compress_cache block is open, got one"
                f" from another while one compresses caches of this {self.name}: enter a block in"
                " each thread, or start it by contextvars.copy_context().run"
            )

    def _before(
        self, module: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Gives a layer that was compressed the mask of what it still holds."""
        cache, hidden = upstream.cache_in(kwargs), _input_of(args, kwargs)
        if cache is None:
            return None
        if not self._acts():
            self._refuse(module, hidden.shape[1])
            return None
        mask = kwargs.get("attention_mask")
        if module is self.first:
            if hidden.shape[1] > 1 and upstream.assisted():
                raise ValueError(_ASSISTED)
            self.forwards[cache] = _Forward(mask)
        layer = _layer_of(cache, module.layer_idx)
        if isinstance(layer, CompressedLayer) and layer.seen:
            heads = module.config.num_attention_heads
            kwargs["attention_mask"] = layer.mask(mask, hidden.shape[1], heads, hidden.dtype)
        return args, kwargs

    @torch.no_grad()
    def _after(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Looks at a layer after several tokens; compresses all layers after the last."""
        cache, hidden = upstream.cache_in(kwargs), _input_of(args, kwargs)
        if not self._acts() or not self.handle.compressing:
            return
        layer = None if cache is None else _checked(cache, module.layer_idx)
        self.ran += module is self.first and hidden.shape[1] > 1
        if layer is None or hidden.shape[1] == 1:
            return
        forward, attention = self.forwards[cache], self.layers[id(module)]
        view = self._view(attention, layer, hidden, forward.mask, kwargs.get("position_ids"))
        forward.looks[view.layer] = self.method.look(view, self.handle.keep)
        # The layer's input may go now, which a slice of it would hold.
        none = hidden.new_empty(hidden.shape[0], 0, hidden.shape[2])
        forward.views[view.layer] = replace(view, hidden_states=none)
        if module is self.last:
            self._shorten(cache, self.forwards.pop(cache))

    def _shorten(self, cache: Cache, forward: _Forward) -> None:
        """Compresses all layers, one after the other."""
        views, looks = forward.views, forward.looks
        lengths = self.method.lengths(list(views.values()), list(looks.values()), self.handle.keep)
        tokens, held = {}, {}
        for index, length in zip(list(views), lengths, strict=True):
            view = views.pop(index)
            kept = self.method.shorten(view, looks.pop(index), length.to(view.keys.device))
            layer = cache.layers[index] = CompressedLayer(kept, view.seen)
            tokens[index] = view.seen, float(kept.real_keys().sum() / kept.slots[..., 0].numel())
            full = full_price_of(view) * view.seen * view.keys.shape[0]
            held[index] = full, layer.nbytes
        self.handle.tokens, self.handle.bytes = tokens, held

    def _view(
        self,
        attention: Attention,
        layer: DynamicLayer,
        hidden: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
    ) -> CacheView:
        keys, module, seen = layer.keys, attention.module, layer.get_seq_length()
        b, h, n, _ = keys.shape
        if isinstance(layer, CompressedLayer):
            slots, bias, real = layer.keys_now()
        else:
            slots, bias, real = torch.arange(n, device=keys.device).expand(b, h, n), None, None
        tokens = _real_tokens(mask, b)
        if tokens is not None:
            seen_keys = tokens.unsqueeze(1).expand(-1, h, -1).gather(2, slots)
            real = seen_keys if real is None else real & seen_keys
        return CacheView(
            keys=keys,
            values=layer.values,
            hidden_states=hidden,
            slots=slots,
            seen=seen,
            scale=float(module.scaling),
            project=attention.project,
            rotate=attention.rotate,
            next=_next(positions, tokens, seen, b).to(keys.device),
            tokens=tokens,
            bias=bias,
            real=real,
            softcap=getattr(module, "attn_logit_softcapping", None),
            layer=attention.index,
        )


def _real_tokens(mask: Tensor | None, samples: int) -> Tensor | None:
    """Read off a layer's mask [B, 1, Q, N] which tokens the newest one sees, bool [B, N]; None:
    all.

    A sample of padding alone counts as one of tokens, so that what is kept of it is finite.
    """
    if mask is None:
        return None
    last = mask[:, 0, -1]
    seen = last if last.dtype == torch.bool else last > torch.finfo(last.dtype).min / 2
    if bool(seen.all()):
        return None
    return (seen | ~seen.any(1, keepdim=True)).expand(samples, -1)


def _next(positions: Tensor | None, tokens: Tensor | None, seen: int, samples: int) -> Tensor:
    """Return the position after that of the newest token that is no padding, LongTensor [B]."""
    if positions is None or positions.dim() != 2:
        return torch.full((samples,), seen) if tokens is None else tokens.sum(1)
    positions = positions.expand(samples, -1)
    if tokens is not None:
        positions = positions.masked_fill(~tokens[:, -positions.shape[1] :], -1)
    return positions.amax(1) + 1


def _input_of(args: Any, kwargs: dict[str, Any]) -> Tensor:
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _layer_of(cache: Cache, index: int) -> Any:
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise ValueError(f"cache: expected a DynamicCache, got {type(cache).__name__}")
    return layers[index] if index < len(layers) else None


def _checked(cache: Cache, index: int) -> DynamicLayer:
    """Return a layer of a cache, and refuse one that can't be compressed."""
    layer = _layer_of(cache, index)
    if type(layer) not in (DynamicLayer, CompressedLayer):
        raise ValueError(
            f"cache: expected a DynamicCache, got {type(cache).__name__} with a"
            f" {type(layer).__name__}; leave cache_implementation out"
        )
    return layer
