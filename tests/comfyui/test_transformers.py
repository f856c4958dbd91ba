"""Recorded calls of each transformer family: the image's keys and values merge, nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mame_sd.core.cells import DRAWS
from mame_sd.core.guidance import partition_index
from mame_sd.core.merge_keys import Choice, Grid, KeyMerging, merge_keys
from tests import oracle
from tests.comfyui.interface import (
    Model,
    applied,
    attention_pytorch,
    network,
    optimized_attention,
)
from tests.comfyui.recorded import CALLS, Recorded

MERGING = {name: call for name, call in CALLS.items() if call.start is not None}
ALONE = {name: call for name, call in CALLS.items() if call.start is None}
OMNI = CALLS["Z-Image Omni, a reference"]  # and a sequence that holds more than all that is known
ALONE["Z-Image Omni, another sequence"] = replace(OMNI, **dict.fromkeys("qkv", (2, 2, 320, 32)))


def tensors(call: Recorded) -> list[Tensor]:
    """Random queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in (call.q, call.k, call.v)]


def mask_of(shape: Any) -> Any:
    """Return a padding mask: the first three of the prompt's tokens are not read."""
    if not isinstance(shape, tuple):
        return shape
    mask = torch.zeros(shape)
    mask[..., :3] = -torch.inf
    return mask


def given(call: Recorded) -> dict[str, Any]:
    """Return the further arguments of a recorded call as tensors."""

    def made(value: Any) -> Any:
        return [*map(torch.zeros, value)] if isinstance(value, list) else torch.zeros(value)

    return {n: value if n == "latent_shapes" else made(value) for n, value in call.given.items()}


def through(
    model: Any, call: Recorded, attend: Callable[[dict[str, Any]], Any], text: int = 7
) -> Any:
    """Call the model; `attend` is called with its options."""
    context = torch.zeros(2, text, 24)
    return model.apply_model(torch.zeros(call.latent), 0.5, attend, context=context, **given(call))


def run(
    node: Any,
    call: Recorded,
    *qkv: Tensor,
    options: dict[str, Any] | None = None,
    function: Any = attention_pytorch,
    layers: int = 1,
) -> Tensor:
    """Run the call with the node, if there is one, and return the last layer's output."""
    model = Model(network(call.model, **call.attributes))
    model.model_options["transformer_options"] |= options or {}
    model = model if node is None else applied(node, model)
    args = tuple(mask_of(value) for value in call.args)
    kwargs = {name: mask_of(value) for name, value in call.kwargs.items()}

    def attend(given: dict[str, Any]) -> Tensor:
        how = {**kwargs, "transformer_options": given, "function": function}
        return [optimized_attention(*qkv, *args, **how) for _ in range(layers)][-1]

    result: Tensor = model.sample(lambda run: through(run, call, attend))
    return result.transpose(1, 2).flatten(2) if call.kwargs.get("skip_output_reshape") else result


def loops(
    call: Recorded, *qkv: Tensor, mask: Tensor | None = None, layer: int = 0, counted: bool = True
) -> Tensor:
    """Compute the same attention in float64 loops, with the groups and queries that were drawn."""
    assert call.start is not None
    if not call.kwargs.get("skip_reshape"):
        width = call.q[-1] // 2
        qkv = tuple(t.flatten(2).unflatten(2, (-1, width)).transpose(1, 2) for t in qkv)
    q, k, v = qkv
    mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
    grid, draw = call.grid[call.grid[0] == 1 :], (partition_index(500.0) + layer) % DRAWS
    grids = [Grid(call.start, grid, 0.25)]
    groups = merge_keys(q, k, v, grids, KeyMerging(), choice=Choice(draw)).groups[0]
    count = min(max(math.prod(grid) // 32, 64), 256) // (q.shape[1] // k.shape[1])
    spread = groups.cells.queries[int(draw)] + call.start
    image = oracle.Image(call.start, groups.groups.tolist(), groups.kept.tolist())
    own = range(call.start, call.start + groups.tokens_in)
    beside = [at for at in range(q.shape[2]) if at not in own]
    output, _ = oracle.merged_attention(
        q, k, v, [image], spread[:count].tolist(), mask, call.kwargs.get("scale"),
        () if counted else (spread.tolist(), beside),
    )  # fmt: skip
    return output.transpose(1, 2).flatten(2).float()


def mask_in(call: Recorded) -> Tensor | None:
    shapes = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, tuple)]
    return mask_of(shapes[0]) if shapes else None


@pytest.mark.parametrize("call", MERGING.values(), ids=MERGING.keys())
def test_equals_float64_loops_and_hands_text_on_as_it_is(node: Any, call: Recorded) -> None:
    qkv = tensors(call)
    seen: list[Tensor] = []

    def attention_basic(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.extend([q, k, v])
        return attention_pytorch(q, k, v, *args, **kwargs)

    got = run(node, call, *qkv, function=attention_basic)
    torch.testing.assert_close(got, loops(call, *qkv, mask=mask_in(call)), rtol=1e-4, atol=1e-4)
    assert seen[0] is qkv[0]
    tokens = 2 if call.kwargs.get("skip_reshape") else 1
    image, behind = math.prod(call.grid), call.k[tokens] - call.start - math.prod(call.grid)
    for whole, fewer in zip(qkv[1:], seen[1:], strict=True):
        whole = whole if tokens == 2 else whole.flatten(2)
        assert fewer.shape[tokens] == call.k[tokens] - image + round(image / 4)
        for start in (0, -behind):
            length = call.start if start == 0 else behind
            at = (tokens, start, length) if length else (tokens, 0, 0)
            assert torch.equal(fewer.narrow(*at), whole.narrow(*at))


@pytest.mark.parametrize("call", ALONE.values(), ids=ALONE.keys())
def test_other_attention_is_left_alone(node: Any, call: Recorded) -> None:
    qkv = tensors(call)
    assert torch.equal(run(node, call, *qkv), run(None, call, *qkv))


@pytest.mark.parametrize(
    "shape", [(103, 103), (2, 103, 103), (2, 1, 1, 103), (2, 2, 103, 103)], ids=str
)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_any_mask_follows_the_keys(node: Any, shape: tuple[int, ...], kind: torch.dtype) -> None:
    """A mask for all queries weighs the image's keys; one for each query sees them all alike."""
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    mask = mask > -1 if kind == torch.bool else mask
    call = replace(CALLS["Flux, a mask"], kwargs={"skip_reshape": True, "mask": mask})
    qkv, start = tensors(call), call.start
    if shape[-2] > 1:
        merged = run(node, call, *qkv)
        assert torch.equal(merged, run(None, call, *qkv)), "each query sees keys of its own"
        mask[..., start:] = mask[..., start, None]
    torch.testing.assert_close(
        run(node, call, *qkv), loops(call, *qkv, mask=mask), rtol=1e-4, atol=1e-4
    )


def test_another_scale_and_heads_apart(node: Any) -> None:
    """As newer engines may ask for; the output is [B, H, L, D]. Nodes may give all by name."""
    call = CALLS["Flux"]
    call = replace(call, kwargs=call.kwargs | {"scale": 0.05, "skip_output_reshape": True})
    qkv = tensors(call)
    expected = loops(call, *qkv)
    torch.testing.assert_close(run(node, call, *qkv), expected, rtol=1e-4, atol=1e-4)
    named = {"heads": call.args[0], **dict(zip("qkv", qkv, strict=True))}
    call = replace(call, args=(), kwargs=call.kwargs | named)
    torch.testing.assert_close(run(node, call), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Flux", "Wan", "Flux, a mask"])
@pytest.mark.parametrize("whose", ["the engine's", "another node's"])
def test_attention_that_may_take_no_mask_is_handed_none(
    node: Any, name: str, whose: str, caplog: Any
) -> None:
    """Unless the call has a mask; the log names the other node's attention."""
    caplog.set_level("INFO")
    call, masks = CALLS[name], []

    def attention_sage(*args: Any, **kwargs: Any) -> Tensor:
        masks.append(kwargs.get("mask"))
        return attention_pytorch(*args, **kwargs)

    def override(function: Any, *args: Any, **kwargs: Any) -> Tensor:
        return attention_sage(*args, **kwargs)

    qkv, mask = tensors(call), mask_in(call)
    given: dict[str, Any] = {"function": attention_sage}
    if whose != "the engine's":
        given = {"options": {"optimized_attention_override": override}}
    got = run(node, call, *qkv, **given)
    expected = loops(call, *qkv, mask=mask, counted=False)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert [one is None for one in masks] == [mask is None]
    own = "" if whose == "the engine's" else "; attention that another node has set is called with"
    (line,) = caplog.messages
    assert line.partition(" the merged keys")[0].endswith(own)
    assert own or "another node" not in line


def test_each_layer_of_a_step_draws_anew(node: Any) -> None:
    blocks = {"double_blocks": [None] * 2, "single_blocks": [None] * 3}
    call = replace(CALLS["Flux"], attributes={**CALLS["Flux"].attributes, **blocks})
    qkv = tensors(call)
    named = run(node, call, *qkv, options={"block_type": "single", "block_index": 1})
    torch.testing.assert_close(named, loops(call, *qkv, layer=3), rtol=1e-4, atol=1e-4)
    for layers in (1, 3):
        got = run(node, call, *qkv, layers=layers)
        expected = loops(call, *qkv, layer=layers - 1)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "text", "mask", "message"),
    [
        # the prompt's own attention would be taken for the image's
        ("Lumina 2, noise refiner", 100, None, "the prompt's 100 tokens are not fewer than the i"),
        ("Lumina 2", 7, (2, 1, 103), "Lumina 2 or Z-Image has a mask, with which the image starts"),
        ("Flux", 7, (2, 1, 1), "a mask of shape [2, 1, 1] is not for 103 keys"),
        ("Wan", 7, "replaced", "another node has replaced our attention; remove one of the two"),
    ],
)
def test_why_an_image_is_left_alone(
    node: Any, name: str, text: int, mask: Any, message: str, caplog: Any
) -> None:
    """The last by a wrapper around the model itself, inside of ours."""
    call = CALLS[name]
    qkv = tensors(call)
    named = {"skip_reshape": call.kwargs.get("skip_reshape", False)}

    def attend(given: dict[str, Any]) -> Tensor:
        if mask == "replaced":
            given["optimized_attention_override"] = lambda f, *a, **named: f(*a, **named)
        options = named | {"mask": mask_of(mask) if isinstance(mask, tuple) else None}
        return optimized_attention(*qkv, 2, **options, transformer_options=given)

    model = applied(node, Model(network(call.model, **call.attributes)))
    got = model.sample(lambda run: through(run, call, attend, text))
    if not isinstance(mask, tuple):
        assert torch.equal(got, attention_pytorch(*qkv, 2, **named))
    (line,) = caplog.messages
    assert line.startswith(f"MaMe merged nothing: {message}")
