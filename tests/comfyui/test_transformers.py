"""Calls of each transformer family's attention, as recorded: the image's keys and values merge,
everything else is as it was.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
    """Random queries, keys and values."""
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
    node: Any,
    call: Recorded,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any] | None = None,
    **values: Any,
) -> Tensor:
    """The call in the engine, with the node applied (or not, with `node` None)."""
    model = Model(network(call))
    model.model_options["transformer_options"] |= options or {}
    values = {
        "mode": "keep",
        "keep": 0.25,
        "tau": 0.8,
        "merge": "keys and values",
        "min_tokens": 64,
    } | values
    model = model if node is None else node.patch(model, **values)[0]
    args = tuple(mask_of(value) for value in call.args)
    kwargs = {name: mask_of(value) for name, value in call.kwargs.items()}

    def attend(given: dict[str, Any]) -> Tensor:
        override = given.get("optimized_attention_override")
        if override is None:
            return attention(q, k, v, *args, **kwargs)
        return override(
            attention,
            q,
            k,
            v,
            *args,
            **kwargs,
            transformer_options=given,
            _inside_attn_wrapper=True,
        )

    result: Tensor = model.apply_model(
        torch.zeros(call.latent), 0.5, attend, context=torch.zeros(2, 7, 24), **given(call)
    )
    return result.transpose(1, 2).flatten(2) if call.kwargs.get("skip_output_reshape") else result


def given(call: Recorded) -> dict[str, Any]:
    """The further arguments of a recorded call, as tensors."""

    def made(name: str, value: Any) -> Any:
        if name == "latent_shapes":
            return value
        if isinstance(value, list):
            return [torch.zeros(shape) for shape in value]
        return torch.zeros(value)

    return {name: made(name, value) for name, value in call.given.items()}


def loops(
    call: Recorded, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **fields: Any
) -> Tensor:
    """The same attention in float64, sample by sample and head by head.

    The image's keys and values merge, and each counts for all the keys that it stands for. Where
    there is no mask, a sample adds what they lack of the mean and covariance of all.
    """
    heads_first = call.kwargs.get("skip_reshape", False)
    heads = call.kwargs.get("heads") or call.args[0]
    q, k, v = ((x.transpose(1, 2) if heads_first else x).flatten(2) for x in (q, k, v))
    assert call.start is not None
    t, rows, columns = call.grid
    length, n = k.shape[1], t * rows * columns
    every = torch.arange(length)
    before, image, after = every.split([call.start, n, length - call.start - n])
    image = image.view(t, rows, columns).transpose(0, 1).flatten()  # frames interleaved
    config = CONFIG.replace(**fields)
    plan = plan_merge(k[:, image], config, (rows * t, columns), draw=draw_at(500.0))
    width = q.shape[-1] // heads
    q, k, v = (x.double().unflatten(2, (-1, width)) for x in (q, k, v))
    shared = heads // k.shape[2]  # queries of how many heads share keys
    fewer_k, fewer_v = (
        torch.cat(
            [
                x[:, before],
                plan.merge(x[:, image].flatten(2)).unflatten(2, (-1, width)),
                x[:, after],
            ],
            1,
        ).repeat_interleave(shared, 2)
        for x in (k, v)
    )
    k, v = (x.repeat_interleave(shared, 2) for x in (k, v))
    proportional = length > n or plan.uneven
    output, scale = torch.empty_like(q), q.shape[-1] ** -0.5
    for b in range(len(q)):
        stands = plan.kept.expand(len(q), -1)[b]
        sizes = torch.ones(fewer_k.shape[1]).double()
        if proportional:
            sizes[call.start : call.start + plan.tokens_kept] = plan.sizes.expand(len(q), -1)[b]
        for h in range(heads):
            whole_k, whole_v, few_k, few_v = (
                k[b, :, h],
                v[b, :, h],
                fewer_k[b, :, h],
                fewer_v[b, :, h],
            )
            logits = scale * q[b, :, h] @ few_k.T + sizes.log()
            if mask is not None:
                seen = (
                    mask.view(*(1,) * (4 - mask.dim()), *mask.shape)
                    if mask.dim() != 3
                    else mask.unsqueeze(1)
                )
                seen = seen.expand(len(q), heads, -1, -1)[b, h][
                    :, torch.cat([before, image[stands], after])
                ]
                logits = (
                    logits.masked_fill(~seen, -torch.inf)
                    if seen.dtype == torch.bool
                    else logits + seen
                )
            output[b, :, h] = logits.softmax(1) @ few_v
            if mask is None and config.correct and shared == 1:
                places = slice(call.start, call.start + plan.tokens_kept)
                drawn, rows = (
                    plan.positions.sample,
                    plan.rows[b, plan.positions.sample] + call.start,
                )
                varies = whole_v[image[drawn]] - few_v[rows], whole_k[image[drawn]] - few_k[rows]
                lacking = within_groups(*varies) * n / length
                if not proportional:
                    mean, covariance = moments(
                        few_k[places], few_v[places], plan.sizes.expand(len(q), -1)[b]
                    )
                    alike, covariance_alike = moments(few_k, few_v, sizes)
                    lacking += covariance - covariance_alike
                    output[b, :, h] += mean - alike
                output[b, :, h] += scale * q[b, :, h] @ lacking.T
    return output.flatten(2).float()


def within_groups(value: Tensor, key: Tensor) -> Tensor:
    """The covariance of what varies within groups, shrunk by how little its two halves agree."""
    halves = [torch.zeros(value.shape[1], key.shape[1]).double() for _ in range(2)]
    for i, (v, k) in enumerate(zip(value, key, strict=True)):
        halves[2 * i // len(key)] += torch.outer(v, k) / (len(key) // 2)
    mean = (halves[0] + halves[1]) / 2
    return mean * ((halves[0] * halves[1]).sum() / mean.square().sum()).clamp(0, 1)


def moments(key: Tensor, value: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of values, and the covariance of values and keys, each counted `sizes` times."""
    mean_key, mean = (
        sum(w * x for w, x in zip(sizes, t, strict=True)) / sizes.sum() for t in (key, value)
    )
    outer = sum(
        w * torch.outer(y - mean, x - mean_key) for w, x, y in zip(sizes, key, value, strict=True)
    )
    return mean, outer / sizes.sum()


MERGING = {name: call for name, call in CALLS.items() if call.start is not None}
ALONE = {name: call for name, call in CALLS.items() if call.start is None}


def mask_in(call: Recorded) -> Tensor | None:
    shape = next(
        (value for value in (*call.args, *call.kwargs.values()) if isinstance(value, tuple)), None
    )
    return None if shape is None else mask_of(shape)


@pytest.mark.parametrize("fields", [{}, {"keep": 0.4}, {"tau": 0.1}, {"correct": False}], ids=str)
@pytest.mark.parametrize("call", MERGING.values(), ids=MERGING.keys())
def test_equals_float64_loops(node: Any, call: Recorded, fields: dict[str, Any]) -> None:
    q, k, v = tensors(call)
    got = run(node, call, q, k, v, mode="tau" if "tau" in fields else "keep", **fields)
    torch.testing.assert_close(
        got, loops(call, q, k, v, mask_in(call), **fields), rtol=1e-4, atol=1e-5
    )
    assert not torch.equal(got, run(None, call, q, k, v))


@pytest.mark.parametrize(
    "shape", [(103, 103), (2, 103, 103), (2, 1, 1, 103), (2, 2, 103, 103)], ids=str
)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_any_mask_follows_the_keys(node: Any, shape: tuple[int, ...], kind: torch.dtype) -> None:
    """A merged key is masked as the token is that it was made into."""
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.float32)
    mask = mask > -1 if kind == torch.bool else mask
    call = replace(CALLS["Flux, a mask"], kwargs={"skip_reshape": True, "mask": mask})
    q, k, v = tensors(call)
    torch.testing.assert_close(
        run(node, call, q, k, v), loops(call, q, k, v, mask), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("scale", [0.05, 0.5])
def test_another_scale_and_heads_apart(node: Any, scale: float) -> None:
    """As newer engines may ask for; the correction is of logits of that scale, and the output [B,
    H, L, D].
    """
    call = CALLS["Flux"]
    q, k, v = tensors(call)
    expected = loops(call, q * scale * 32**0.5, k, v)
    call = replace(call, kwargs=call.kwargs | {"scale": scale, "skip_output_reshape": True})
    torch.testing.assert_close(run(node, call, q, k, v), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("call", MERGING.values(), ids=MERGING.keys())
def test_merged_keys_weigh_as_many_as_they_stand_for(node: Any, call: Recorded) -> None:
    """An image of equal tokens is the same to every query, and so is the text beside it."""
    q, k, v = tensors(call)
    tokens = 2 if call.kwargs.get("skip_reshape") else 1
    for x in (k, v):
        image = x.movedim(tokens, 0)[call.start :][: math.prod(call.grid)]
        image[:] = image[:1].clone()
    whole = run(None, call, q, k, v)
    torch.testing.assert_close(run(node, call, q, k, v), whole, rtol=1e-5, atol=1e-4)


def test_each_layer_of_a_step_draws_anew(node: Any) -> None:
    """As the layers of a model do by `apply_mame`; the next call of the model begins again."""
    call = CALLS["Flux"]
    q, k, v = tensors(call)
    keys: list[Tensor] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, heads: int, **kwargs: Any) -> Tensor:
        keys.append(k)
        return attention(q, k, v, heads, **kwargs)

    def attend(given: dict[str, Any]) -> Tensor:
        for _ in range(3):
            given["optimized_attention_override"](
                noted, q, k, v, 2, skip_reshape=True, transformer_options=given
            )
        return q

    model = node.patch(Model(network(call)), "keep", 0.25, 0.8, "keys and values", 64)[0]
    for _ in range(2):
        model.apply_model(torch.zeros(call.latent), 0.5, attend, context=torch.zeros(2, 7, 24))
    assert len(keys) == 6
    image = k[:, :, 7:].transpose(1, 2).flatten(2)
    for i, found in enumerate(keys):
        plan = plan_merge(image, CONFIG, (8, 12), draw=draw_at(500.0) + i % 3)
        assert torch.equal(found[:, :, 7:].transpose(1, 2).flatten(2), plan.merge(image))


@pytest.mark.parametrize("call", MERGING.values(), ids=MERGING.keys())
def test_nothing_above_tau_is_the_unmerged_call(node: Any, call: Recorded) -> None:
    q, k, v = tensors(call)
    torch.testing.assert_close(
        run(node, call, q, k, v, mode="tau", tau=1.0), run(None, call, q, k, v)
    )


@pytest.mark.parametrize("call", ALONE.values(), ids=ALONE.keys())
def test_other_attention_is_left_alone(node: Any, call: Recorded) -> None:
    q, k, v = tensors(call)
    assert torch.equal(run(node, call, q, k, v), run(None, call, q, k, v))


@pytest.mark.parametrize("call", MERGING.values(), ids=MERGING.keys())
def test_the_text_is_handed_on_as_it_is(node: Any, call: Recorded) -> None:
    """And another node's override is called with the merged keys, as the engine's own function
    is.
    """
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
    assert torch.equal(seen[0], q)
    text = [
        x.narrow(tokens, 0, call.start) for x in (k, v if tokens == 2 else v.flatten(2), *seen[1:])
    ]
    assert torch.equal(text[2], text[0])
    assert seen[1].shape[tokens] == seen[2].shape[tokens] < k.shape[tokens]
    assert torch.equal(text[3], text[1])


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
        lambda run: run.apply_model(
            torch.zeros(call.latent), 0.5, attend, context=torch.zeros(2, 100, 24)
        )
    )
    assert torch.equal(got, attention(q, k, v, 2, skip_reshape=True))
    assert caplog.messages == [
        "MaMe merged nothing: the prompt's 100 tokens are not fewer than the image's 96"
    ]


def test_another_nodes_attention_that_replaces_ours_is_told(node: Any, caplog: Any) -> None:
    """It goes in at a wrapper around the model itself, inside of ours."""
    call = CALLS["Flux"]
    model = node.patch(Model(network(call)), "keep", 0.25, 0.8, "keys and values", 16)[0]
    q, k, v = tensors(call)

    def attend(given: dict[str, Any]) -> Tensor:
        given["optimized_attention_override"] = other = lambda f, *a, **named: f(*a, **named)
        result: Tensor = other(attention, q, k, v, 2, skip_reshape=True, transformer_options=given)
        return result

    model.sample(
        lambda run: run.apply_model(
            torch.zeros(call.latent), 0.5, attend, context=torch.zeros(2, 7, 24)
        )
    )
    assert caplog.messages == [
        "MaMe merged nothing: another node has put its attention instead of ours, and wins: take"
        " one of them out"
    ]


def test_the_log_names_another_nodes_attention(node: Any, caplog: Any) -> None:
    caplog.set_level("INFO")
    call = CALLS["Lumina 2, noise refiner"]
    model = node.patch(Model(network(call)), "keep", 0.25, 0.8, "keys and values", 16)[0]
    q, k, v = tensors(call)

    def other(function: Any, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = function(*args, **kwargs)
        return result

    model.model_options["transformer_options"]["optimized_attention_override"] = other
    model.sample(
        lambda run: run.apply_model(
            torch.zeros(call.latent),
            0.5,
            lambda given: given["optimized_attention_override"](
                attention, q, k, v, 2, None, skip_reshape=True, transformer_options=given
            ),
            context=torch.zeros(2, 7, 24),
        )
    )
    (line,) = caplog.messages
    assert line.startswith("MaMe merged 96 -> 24 tokens")
    assert line.endswith("attention that another node has set is called with the merged keys")
