"""Functions that somebody puts around a merged module's forward, outside diffusers' registry of hooks, stay."""

from __future__ import annotations

import copy
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers.hooks import HookRegistry
from diffusers.hooks import ModelHook as DiffusersHook

from mame_sd import apply_mame, mame, remove_mame
from tests.builders.layers import attention, tokens

MERGING = {"tau": 0.3, "min_tokens": 1}


def doubled(attn: Any) -> None:
    """Puts a function around `attn.forward` that doubles the output."""
    inner = attn.forward
    attn.forward = lambda *args, **kwargs: 2 * inner(*args, **kwargs)


def test_a_wrapper_stays_when_merging_goes() -> None:
    attn, x = attention(), tokens()
    before = attn(x)
    handle = apply_mame(attn, **MERGING)
    merged = attn(x)
    doubled(attn)
    assert torch.equal(attn(x), 2 * merged)
    handle.remove()
    assert not handle.installed
    assert torch.equal(attn(x), 2 * before)
    apply_mame(attn, **MERGING)
    assert not torch.equal(attn(x), 2 * before)
    remove_mame(attn)
    assert torch.equal(attn(x), 2 * before)


def test_a_wrapper_between_two_hooks_stays() -> None:
    class Negate(DiffusersHook):
        def post_forward(self, module: Any, output: Any) -> Any:
            return -output

    attn, x = attention(), tokens()
    before = attn(x)
    apply_mame(attn, **MERGING)
    doubled(attn)
    HookRegistry.check_if_exists_or_initialize(attn).register_hook(Negate(), "negate")
    remove_mame(attn)
    assert torch.equal(attn(x), -2 * before)
    attn._diffusers_hook.remove_hook("negate")
    assert torch.equal(attn(x), 2 * before)


def test_a_hook_of_accelerate_stays_and_comes_off() -> None:
    class Double(ModelHook):
        def post_forward(self, module: Any, output: Any) -> Any:
            return 2 * output

    attn, x = attention(), tokens()
    before = attn(x)
    with mame(attn, **MERGING):
        merged = attn(x)
        add_hook_to_module(attn, Double())
        assert torch.equal(attn(x), 2 * merged)
    assert torch.equal(attn(x), 2 * before)
    remove_hook_from_module(attn)
    assert torch.equal(attn(x), before)


def test_copies_are_not_taken_for_wrapped() -> None:
    attn, x = attention(), tokens()
    before = attn(x)
    apply_mame(attn, **MERGING)
    merged = attn(x)
    twin = copy.deepcopy(attn)
    remove_mame(twin)
    assert torch.equal(twin(x), before)
    assert torch.equal(attn(x), merged)
