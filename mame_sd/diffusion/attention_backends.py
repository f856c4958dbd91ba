"""Intercept the backends of diffusers' dispatcher, such as SageAttention and FlashAttention.

They call no `torch.nn.functional.scaled_dot_product_attention`, so each one is wrapped. While a
layer merges, the wrapper merges the keys (`mame_sd.core.intercept`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mame_sd.core.intercept import running_job, watch_replacement

# Backends of the dispatcher whose kernels accept a bias of the logits. For all others, keys carry
# the sizes of their groups (`sized_keys`).
_TAKES_BIAS = {"native", "_native_cudnn", "_native_efficient", "_native_math", "flex", "xformers"}


class _Backends(dict[Any, Callable[..., Any]]):
    """The backends of diffusers' dispatcher. Each one is intercepted when it is registered."""

    def __setitem__(self, name: Any, backend: Callable[..., Any]) -> None:
        super().__setitem__(name, _watched(backend, getattr(name, "value", name)))


@torch.compiler.assume_constant_result  # runs during compilation, not in the graph
def watch_kernels() -> None:
    """Intercept all backends of diffusers' dispatcher, present and future.

    A function that was put in the place of scaled_dot_product_attention is intercepted too. If no
    layer of the thread merges, an intercepted kernel runs as before.
    """
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    if not isinstance(Registry._backends, _Backends):
        backends, Registry._backends = Registry._backends, _Backends()
        for name, backend in backends.items():
            Registry._backends[name] = backend
    watch_replacement()


def _heads_last(output: Tensor) -> Tensor:
    return output.transpose(1, 2)


def _watched(backend: Callable[..., Any], name: str) -> Callable[..., Any]:
    if hasattr(backend, "_mame_watched"):
        return backend
    # diffusers' own native backend calls scaled_dot_product_attention, which is intercepted.
    native = name == "native" and backend.__module__ == "diffusers.models.attention_dispatch"
    counted = name in _TAKES_BIAS and "attn_mask" in inspect.signature(backend).parameters

    @functools.wraps(backend)
    def watched(**call: Any) -> Any:
        job = None if native else running_job()
        mask = call.get("attn_mask")
        if job is None or (mask is not None and not isinstance(mask, Tensor)):  # flex's BlockMask
            return backend(**call)
        changes = {n: call[n].transpose(1, 2) for n in ("query", "key", "value")}
        if mask is not None and mask.dim() == 2:  # [B, N] in the dispatcher
            changes["attn_mask"] = mask[:, None, None]

        def heads_last(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> Any:
            qkv = {"query": query, "key": key, "value": value}
            for name, t in qkv.items():
                same = t is changes[name]
                qkv[name] = call[name] if same else t.transpose(1, 2).contiguous()
            return backend(**qkv, **others)

        unmerged = functools.partial(backend, **call)
        return job.attend({**call, **changes}, name, counted, heads_last, unmerged, _heads_last, 1)

    watched._mame_watched = True  # type: ignore[attr-defined]
    return watched
