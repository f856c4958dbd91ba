"""Calls of each transformer family's attention, as recorded: the image's keys and values merge, everything else is as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comfyui.joint import columns_of, weighed
from mame_sd import MaMeConfig, plan_merge
from mame_sd.core.partition import draw_at
from tests.comfyui.interface import Model, attention
from tests.comfyui.recorded import CALLS, Recorded

CONFIG = MaMeConfig(keep=0.25, merge="kv")


def network(call: Recorded) -> nn.Module:
    module = type(call.model, (nn.Module,), {})()
    for name, value in call.attributes.items():
        setattr(module, name, value)
    return module


def tensors(call: Recorded) -> list[Tensor]:
    """Smooth keys, as a trained model's are: what merges is then alike."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in (call.q, call.k, call.v)]


def mask_of(shape: Any) -> Any:
    """A padding mask: the first three of the prompt's tokens are not read."""
    if not isinstance(shape, tuple):
        return shape
    mask = torch.zeros(shape)
    mask[..., :3] = -torch.inf
    return mask


def run(
    node: Any, call: Recorded, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any] | None = None, **values: Any
) -> Tensor:
    """The call in the engine, with the node applied (or not, with `node` None)."""
    model = Model(network(call))
    model.model_options["transformer_options"] |= options or {}
    values = {"mode": "keep", "keep": 0.25, "tau": 0.8, "merge": "keys and values", "min_tokens": 64} | values
    model = model if node is None else node.patch(model, **values)[0]
    args = tuple(mask_of(value) for value in call.args)
    kwargs = {name: mask_of(value) for name, value in call.kwargs.items()}

    def attend(given: dict[str, Any]) -> Tensor:
        override = given.get("optimized_attention_override")
        function = heads_given(attention)
        if override is None:
            return function(q, k, v, *args, **kwargs, transformer_options=given)
        return override(function, q, k, v, *args, **kwargs, transformer_options=given, _inside_attn_wrapper=True)

    references = [torch.zeros(shape) for shape in call.references]
    result: Tensor = model.apply_model(
        torch.zeros(call.latent), 0.5, attend, context=torch.zeros(2, 7, 24), ref_latents=references or None
    )
    return result


def heads_given(function: Any) -> Any:
    def called(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        return function(q, k, v, heads, mask, kwargs.get("skip_reshape", False))

    return called


def merged_by_hand(call: Recorded, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same attention with the image's keys and values merged, written plainly on [B, L, C]."""
    heads_first = call.kwargs.get("skip_reshape", False)
    heads = call.kwargs.get("heads") or call.args[0]
    q, k, v = ((x.transpose(1, 2) if heads_first else x).flatten(2) for x in (q, k, v))
    assert call.start is not None
    *frames, rows, columns = (size // 2 if call.latent[-1] == 24 else size for size in call.latent[2:])
    t = call.latent[2] if frames else 1
    n = t * rows * columns
    image = slice(call.start, call.start + n)
    rowwise = torch.arange(n).view(t, rows, columns).transpose(0, 1).flatten()
    plan = plan_merge(k[:, image][:, rowwise], CONFIG, (rows * t, columns), draw=draw_at(500.0))
    k, v = (
        torch.cat([x[:, : call.start], plan.merge(x[:, image][:, rowwise]), x[:, call.start + n :]], 1) for x in (k, v)
    )
    masked = any(isinstance(value, tuple) for value in (*call.args, *call.kwargs.values()))
    mask = mask_of((2, 1, k.shape[1])) if masked else torch.zeros(2, 1, k.shape[1])
    if k.shape[1] > plan.tokens_kept:  # text beside it
        mask[:, 0, call.start : call.start + plan.tokens_kept] += plan.sizes.log()
    return attention(q, k, v, heads, mask)


MERGING = {name: call for name, call in CALLS.items() if call.start is not None}
ALONE = {name: call for name, call in CALLS.items() if call.start is None}


@pytest.mark.parametrize("call", MERGING.values(), ids=MERGING.keys())
def test_the_image_merges(node: Any, call: Recorded) -> None:
    q, k, v = tensors(call)
    got = run(node, call, q, k, v)
    torch.testing.assert_close(got, merged_by_hand(call, q, k, v))
    assert not torch.equal(got, run(None, call, q, k, v))


@pytest.mark.parametrize("call", MERGING.values(), ids=MERGING.keys())
def test_merged_keys_weigh_as_many_as_they_stand_for(node: Any, call: Recorded) -> None:
    """An image of equal tokens is the same to every query, and so is the text beside it."""
    q, k, v = tensors(call)
    tokens = 2 if call.kwargs.get("skip_reshape") else 1
    for x in (k, v):
        image = x.movedim(tokens, 0)[call.start :][: x.shape[tokens] - sum(r[-1] * r[-2] // 4 for r in call.references)]
        image[:] = image[:1].clone()
    torch.testing.assert_close(run(node, call, q, k, v), run(None, call, q, k, v))


@pytest.mark.parametrize("dims", [0, 2, 3, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_weight_of_a_key_is_added_to_any_mask(batch: int, dims: int) -> None:
    weights = torch.arange(5.0).expand(batch, 5)
    q, k, v = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    shape = {2: (5, 5), 3: (2, 5, 5), 4: (2, 1, 5, 5)}.get(dims)
    expected = attention(q, k, v, 2, weights.expand(2, 5)[:, None] + (0 if shape is None else barred(shape)))
    for mask in [None] if shape is None else [barred(shape), barred(shape) == 0]:
        found = weighed(mask, weights if batch == 2 else weights[0], torch.float32)
        torch.testing.assert_close(attention(q, k, v, 2, found), expected)


def barred(shape: tuple[int, ...]) -> Tensor:
    mask = torch.zeros(shape)
    mask[..., 1:3] = -torch.inf
    return mask


def test_each_layer_of_a_step_draws_anew(node: Any) -> None:
    """As the layers of a model do by `apply_mame`; the next call of the model begins again."""
    call = CALLS["Flux"]
    q, k, v = tensors(call)
    keys: list[Tensor] = []

    def attend(given: dict[str, Any]) -> Tensor:
        for _ in range(3):
            given["optimized_attention_override"](
                lambda q, k, v, *rest, **kwargs: keys.append(k),
                q,
                k,
                v,
                2,
                skip_reshape=True,
                transformer_options=given,
            )
        return q

    model = node.patch(Model(network(call)), "keep", 0.25, 0.8, "keys and values", 64)[0]
    for _ in range(2):
        model.apply_model(torch.zeros(call.latent), 0.5, attend, context=torch.zeros(2, 7, 24))
    image = k[:, :, 7:].transpose(1, 2).flatten(2)
    for i, found in enumerate(keys):
        plan = plan_merge(image, CONFIG, (8, 12), draw=draw_at(500.0) + i % 3)
        assert torch.equal(found[:, :, 7:].transpose(1, 2).flatten(2), plan.merge(image))


@pytest.mark.parametrize("call", MERGING.values(), ids=MERGING.keys())
def test_nothing_above_tau_is_the_unmerged_call(node: Any, call: Recorded) -> None:
    q, k, v = tensors(call)
    torch.testing.assert_close(run(node, call, q, k, v, mode="tau", tau=1.0), run(None, call, q, k, v))


@pytest.mark.parametrize("call", ALONE.values(), ids=ALONE.keys())
def test_other_attention_is_left_alone(node: Any, call: Recorded) -> None:
    q, k, v = tensors(call)
    assert torch.equal(run(node, call, q, k, v), run(None, call, q, k, v))


@pytest.mark.parametrize("call", MERGING.values(), ids=MERGING.keys())
def test_the_text_is_handed_on_as_it_is(node: Any, call: Recorded) -> None:
    """And another node's override is called with the merged keys, as the engine's own function is."""
    q, k, v = tensors(call)
    seen: list[Tensor] = []

    def other(function: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.extend([q, k, v])
        result: Tensor = function(q, k, v, *args, **kwargs)
        return result

    got = run(node, call, q, k, v, {"optimized_attention_override": other})
    assert torch.equal(got, run(node, call, q, k, v))
    tokens = 2 if call.kwargs.get("skip_reshape") else 1
    assert call.start is not None
    for before, after in zip((k, v), seen[1:], strict=True):
        assert after.shape[tokens] < before.shape[tokens]
        before = before if tokens == 2 else before.flatten(2)
        assert torch.equal(after.narrow(tokens, 0, call.start), before.narrow(tokens, 0, call.start))
    assert torch.equal(seen[0], q)


def test_a_prompt_as_long_as_the_image_leaves_it_alone(node: Any, caplog: Any) -> None:
    """The prompt's own attention would be taken for the image's."""
    call = CALLS["Lumina 2, noise refiner"]
    model = node.patch(Model(network(call)), "keep", 0.25, 0.8, "keys and values", 16)[0]
    q, k, v = tensors(call)

    def attend(given: dict[str, Any]) -> Tensor:
        result: Tensor = given["optimized_attention_override"](
            attention, q, k, v, 2, None, skip_reshape=True, transformer_options=given
        )
        return result

    got = model.sample(
        lambda run: run.apply_model(torch.zeros(call.latent), 0.5, attend, context=torch.zeros(2, 100, 24))
    )
    assert torch.equal(got, attention(q, k, v, 2, skip_reshape=True))
    assert caplog.messages == ["MaMe merged nothing: the prompt's 100 tokens are not fewer than the image's 96"]


def test_masks_that_differ_between_samples_and_heads_follow_their_keys(node: Any) -> None:
    kept = torch.tensor([[3, 0, 5], [1, 2, 4]])
    mask = torch.arange(2 * 1 * 2 * 9.0).view(2, 1, 2, 9)
    got = columns_of(mask, kept, (1, 2, 3), 2)
    assert got.shape == (2, 1, 2, 6)
    assert torch.equal(got[0, 0, 1], mask[0, 0, 1, [0, 1, 5, 2, 7, 8]])
    assert torch.equal(got[1, 0, 0], mask[1, 0, 0, [0, 1, 3, 4, 6, 8]])
    assert torch.equal(columns_of(mask[0, 0], kept, (1, 2, 3), 2)[1], mask[0, 0][:, [0, 1, 3, 4, 6, 8]])


def test_a_padded_image_ends_before_its_padding(node: Any) -> None:
    """Z-Image pads prompt and image to multiples of 32 tokens: here 32, and 117 of the image to 128."""
    attributes = {"patch_size": 2, "pad_tokens_multiple": 32}
    shape = (2, 2, 160, 32)
    call = Recorded("NextDiT", shape, shape, shape, (2, None), {"skip_reshape": True}, (2, 16, 18, 26), 32, attributes)
    q, k, v = tensors(call)
    got = run(node, call, q, k, v)
    image = slice(32, 32 + 9 * 13)
    keys, values = (x.transpose(1, 2).flatten(2) for x in (k, v))
    plan = plan_merge(keys[:, image], CONFIG, (9, 13), draw=draw_at(500.0))
    keys, values = (torch.cat([x[:, :32], plan.merge(x[:, image]), x[:, image.stop :]], 1) for x in (keys, values))
    mask = torch.zeros(2, 1, keys.shape[1])
    mask[:, 0, 32 : 32 + plan.tokens_kept] = plan.sizes.log()
    torch.testing.assert_close(got, attention(q.transpose(1, 2).flatten(2), keys, values, 2, mask))
