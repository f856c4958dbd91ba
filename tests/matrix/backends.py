"""Merged keys in front of the attention kernels of diffusers' dispatcher.

Kernels that need a GPU are replaced by stand-ins, which assert what they are given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch as dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from torch import Tensor

from mame_sd.core.intercept import UNCOUNTED
from tests.matrix.models.watch import check_by_loop, merging

BACKENDS = ("flex", "sage", "flash", "xformers")
TAKES_NO_MASK = ("sage", "flash")
NO_MASK = "`attn_mask` is not supported for {}"


@contextmanager
def dispatcher() -> Iterator[None]:
    """Let kernels that are not installed be registered, and restore the registry at the end."""
    active, before = Registry._active_backend, dict(Registry._backends)
    names = dict(Registry._supported_arg_names)
    needs = ("_CAN_USE_SAGE_ATTN", "_CAN_USE_FLASH_ATTN", "_CAN_USE_XFORMERS_ATTN")
    with mock.patch.multiple(dispatch, **dict.fromkeys(needs, True)):
        try:
            yield
        finally:
            for name, backend in before.items():  # one by one, to be watched
                Registry._backends[name] = backend
            Registry._supported_arg_names.update(names)
            Registry._active_backend = active


@contextmanager
def stand_ins() -> Iterator[list[str]]:
    """Stand-ins for kernels that are not installed; the names of those that are called."""
    called: list[str] = []

    def stand_in(name: str) -> Callable[..., Tensor]:
        def kernel(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            called.append(name)
            batch, _, heads, width = query.shape  # [B, N, H, D]
            assert key.shape == value.shape == (batch, *key.shape[1:3], width)
            assert heads == key.shape[2] or (enable_gqa and heads % key.shape[2] == 0)
            assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
            assert query.dtype == key.dtype == value.dtype
            if name in TAKES_NO_MASK and attn_mask is not None:
                raise ValueError(NO_MASK.format(name))  # as diffusers' own do
            if attn_mask is not None:
                if attn_mask.dim() == 2:  # [B, N], as the dispatcher has it
                    attn_mask = attn_mask[:, None, None]
                assert attn_mask.dim() == 4
                attn_mask = attn_mask.expand(batch, heads, query.shape[1], key.shape[1])
            q, k, v = (t.transpose(1, 2) for t in (query, key, value))
            how: dict[str, Any] = {"scale": scale, "is_causal": is_causal, "enable_gqa": enable_gqa}
            return F.scaled_dot_product_attention(q, k, v, attn_mask, **how).transpose(1, 2)

        return kernel

    with dispatcher():
        for name in ("sage", "flash", "xformers"):
            Registry.register(AttentionBackendName(name))(stand_in(name))
        yield called


def check_kernels(run: Callable[[], list[Tensor]], handle: Any) -> None:
    """Assert that each kernel of the dispatcher gets the merged keys of the model of `run`."""
    native, plain = run(), {layer.name for layer in handle.report().layers if layer.merged}
    whole = _whole(run, handle)
    with stand_ins():
        for backend in BACKENDS:
            handle.reset()
            counted = backend not in TAKES_NO_MASK
            with attention_backend(backend), merging() as calls:
                try:
                    merged = run()
                except ValueError as error:
                    with pytest.raises(ValueError, match=re.escape(str(error))):
                        _whole(run, handle)
                    continue
            layers = [layer for layer in handle.report().layers if layer.merged]
            assert {layer.name for layer in layers} == plain, backend
            note = f"attention by {backend}{'' if counted else UNCOUNTED}"
            assert all(
                note in layer.reason or "attention by" not in layer.reason for layer in layers
            )
            if counted:
                with attention_backend(backend):
                    alone = _whole(run, handle)
                for one, other, a, b in zip(merged, native, alone, whole, strict=True):
                    rounding = float((a - b).abs().max())
                    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 + 2 * rounding)
            elif backend == TAKES_NO_MASK[0]:
                for call in calls:
                    check_by_loop(call)
    handle.reset()
    assert all(map(torch.equal, run(), native)), "native again"


def _whole(run: Callable[[], list[Tensor]], handle: Any) -> list[Tensor]:
    """Return what the model gives without merging."""
    handle.active = False
    try:
        return run()
    finally:
        handle.active = True
