"""Test apply_mame next to other changes of a model: wrapped forwards, processors, adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import ContextParallelConfig
from diffusers.hooks import HookRegistry, LayerSkipConfig, apply_layer_skip
from diffusers.hooks import ModelHook as DiffusersHook
from diffusers.models.attention_processor import Attention, AttnProcessor2_0

from mame_sd import apply_mame, remove_mame
from mame_sd.report import NothingMergedError
from tests.builders.layers import attention, tokens
from tests.builders.tiny import gligen_inputs, run_unet, tiny_unet

MERGING = {"tau": 0.3, "min_tokens": 1}


def doubled(attn: Any) -> None:
    """Put a function around `attn.forward` that doubles the output."""
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


@pytest.mark.parametrize("first", ["cache", "merging"])
def test_what_stands_in_for_a_forward_is_around_merging_whichever_came_first(first: str) -> None:
    class Every(DiffusersHook):
        """Repeat the first call's output in the second call, as a cache does."""

        kept: Any = None

        def new_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.kept is None:
                self.kept = self.fn_ref.original_forward(*args, **kwargs)
            return self.kept

    attn, x = attention(), tokens()
    before = attn(x)
    with apply_mame(attn, **MERGING):
        merged = attn(x)
    registry = HookRegistry.check_if_exists_or_initialize(attn)
    if first == "cache":
        registry.register_hook(Every(), "cache")
    handle = apply_mame(attn, **MERGING)
    if first == "merging":
        registry.register_hook(Every(), "cache")
    assert torch.equal(attn(x), merged)
    assert torch.equal(attn(2 * x), merged)
    assert handle.report().layers[0].calls == 1
    registry.remove_hook("cache")
    assert torch.equal(attn(x), merged)
    handle.remove()
    assert torch.equal(attn(x), before)


def test_replicas_of_data_parallel_are_refused() -> None:
    """Replicas of a merged UNet or attention are refused; after removal they are allowed."""
    unet, attn = tiny_unet(), attention()
    for model in (unet, attn):
        apply_mame(model, min_tokens=1)
        hooked = next(m for m in model.modules() if "forward" in vars(m))
        with pytest.raises(
            RuntimeError, match=r"^nn\.DataParallel makes replicas .* call remove_mame"
        ):
            hooked._replicate_for_data_parallel()
        remove_mame(model)
        assert type(hooked._replicate_for_data_parallel()) is type(hooked)


def test_a_model_spread_over_devices_is_refused() -> None:
    unet = tiny_unet()
    config = ContextParallelConfig(ulysses_degree=2)
    unet._parallel_config = config  # as enable_parallelism notes it
    with pytest.raises(ValueError, match=r"^UNet2DConditionModel is spread over devices"):
        apply_mame(unet, min_tokens=40)
    unet._parallel_config = None
    apply_mame(unet, min_tokens=40)
    unet._parallel_config = config
    with pytest.raises(RuntimeError, match="call remove_mame, or leave the model on one device"):
        run_unet(unet)
    remove_mame(unet)
    run_unet(unet)


def test_a_forward_that_was_wrapped_before_gets_its_arguments_as_they_came() -> None:
    """Wrap the forward as HyperTile does."""

    def wrap(forward: Any) -> Any:
        return lambda *args, **kwargs: forward(args[0], *args[1:], **kwargs)

    plain, wrapped = tiny_unet(), tiny_unet()
    for module in wrapped.modules():
        if isinstance(module, Attention):
            module.forward = wrap(module.forward)
    outputs = []
    for unet in (plain, wrapped):
        apply_mame(unet, min_tokens=40, tau=0.2)
        outputs.append(run_unet(unet))
    assert torch.equal(*outputs)


class Surrounding(AttnProcessor2_0):
    """Put other keys before and after the layer's own."""

    def __init__(self, before: int, after: int) -> None:
        self.before, self.after = before, after

    def __call__(self, attn: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """See `AttnProcessor2_0`."""
        x = hidden_states
        every = torch.cat([-x[:, : self.before], x, -x[:, : self.after]], 1)
        return super().__call__(attn, x, every)


class Storing(AttnProcessor2_0):
    """Keep the number of tokens, as processors of self-attention guidance keep a map."""

    kept = 0

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, *args: Any, **_: Any
    ) -> torch.Tensor:
        """See `AttnProcessor2_0`."""
        self.kept = hidden_states.shape[1]
        return super().__call__(attn, hidden_states, *args)


def test_whole_tokens_stay_around_a_processor_that_keeps_what_it_saw() -> None:
    attn, x = attention(), tokens()
    expected = attn(x)
    handle = apply_mame(attn, tau=-0.9, min_tokens=1)
    attn.set_processor(Storing())
    assert torch.equal(attn(x), expected)
    assert attn.processor.kept == x.shape[1]
    with pytest.raises(NothingMergedError, match="Storing may do more than attention"):
        handle.report()
    handle.set(keep=0.5)
    assert not torch.equal(attn(x), expected)
    assert attn.processor.kept == x.shape[1]


@pytest.mark.parametrize(("before", "after"), [(3, 0), (0, 3)])
def test_keys_among_others_that_a_processor_adds_are_left_alone(before: int, after: int) -> None:
    attn, x = attention(), tokens()
    handle = apply_mame(attn, keep=0.5, min_tokens=1)
    attn.set_processor(Surrounding(before, after))
    merged = attn(x)
    remove_mame(attn)
    assert torch.equal(attn(x), merged)
    with pytest.raises(NothingMergedError, match="Surrounding calls no attention over"):
        handle.report()


def test_layer_skip_of_attention_scores_leaves_keys_whole_and_the_report_says_why() -> None:
    config = LayerSkipConfig(
        [0],
        fqn="mid_block.attentions.0.transformer_blocks",
        skip_attention=False,
        skip_attention_scores=True,
        skip_ff=False,
    )
    unet = tiny_unet()
    apply_layer_skip(unet, config)
    handle = apply_mame(unet, keep=0.5, min_tokens=1)
    run_unet(unet)
    (layer,) = (layer for layer in handle.report().layers if layer.name.startswith("mid_block"))
    assert not layer.merged
    assert "layer skip" in layer.reason


def test_image_tokens_among_others_are_left_alone() -> None:
    unet = tiny_unet(attention_type="gated", cross_attention_dim=16)
    handle = apply_mame(unet, tau=0.2, min_tokens=40)
    with torch.no_grad():
        unet(**gligen_inputs(unet))
    layers = handle.report().layers
    assert {layer.merged for layer in layers if layer.name.endswith("attn1")} == {True}
    grounded = [layer for layer in layers if "fuser" in layer.name]
    assert len(grounded) == 7
    assert {layer.merged for layer in grounded} == {False}
    assert grounded[0].reason == "259 tokens are not those of 16 x 16"
    assert grounded[0].tokens_in == 259
