"""SD3's whole tokens: what the node does by default is what `apply_mame` does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from mame_sd import apply_mame
from tests.builders.settings import nested
from tests.comfyui.interface import Model, OpenAISignatureMMDITWrapper

KEYS, QUERIES = "keys and values", "queries too"
DEFAULT = {"mode": "default", "keep": 0.1, "tau": 0.1, "merge": KEYS, "min_tokens": 64}


@pytest.fixture(scope="module")
def transformer() -> SD3Transformer2DModel:
    """In float64, in which two orders of one sum agree to 1e-13 of outputs up to 85 on any
    processor: in float32 they differ by up to 3e-4 where AVX-512 sums.
    """
    torch.manual_seed(0)
    made = SD3Transformer2DModel(
        sample_size=24,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        pos_embed_max_size=12,
        qk_norm="rms_norm",
    )
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.double().eval()


@pytest.fixture
def model(transformer: Any) -> Model:
    return Model(OpenAISignatureMMDITWrapper(transformer.transformer_blocks))


class Inputs:
    """What reaches the blocks of `transformer`, and what it makes of it."""

    def __init__(self, transformer: Any, timestep: float = 500.0) -> None:
        generator = torch.Generator().manual_seed(1)
        self.latent, text, pooled = (
            torch.randn(2, *shape, generator=generator).double()
            for shape in ((4, 16, 24), (7, 16), (16,))
        )
        seen: list[Any] = []
        blocks = transformer.transformer_blocks
        hooks = [
            blocks[0].register_forward_pre_hook(
                lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True
            ),
            blocks[-1].register_forward_hook(lambda _, args, output: seen.append(output[1])),
        ]
        with torch.no_grad():
            transformer(self.latent, text, pooled, torch.full((2,), timestep))
        for hook in hooks:
            hook.remove()
        (given, self.expected) = seen
        self.tokens = given["hidden_states"], given["encoder_hidden_states"], given["temb"]
        self.sigma = timestep / 1000

    @torch.no_grad()
    def run(self, model: Model) -> Tensor:
        """What the engine's blocks make of it."""
        output: Tensor = model.apply_model(
            self.latent,
            self.sigma,
            lambda options: model.network(*self.tokens, options),
            context=self.tokens[1],
        )
        return output


@pytest.mark.parametrize(
    ("fields", "inputs"),
    [
        ({}, {}),
        ({"merge": "kv", "keep": 0.25}, {"mode": "keep", "keep": 0.25}),
        ({"merge": "qkv", "keep": 0.4}, {"mode": "keep", "keep": 0.4, "merge": QUERIES}),
        ({"merge": "qkv", "tau": 0.3}, {"mode": "tau", "tau": 0.3, "merge": QUERIES}),
        (
            {"merge": "qkv", "keep": 0.25, "correct": False},
            {"mode": "keep", "keep": 0.25, "merge": QUERIES, "correct": False},
        ),
    ],
    ids=str,
)
def test_the_default_on_sd3_is_that_of_apply_mame(
    node: Any, transformer: Any, model: Model, fields: dict[str, Any], inputs: dict[str, Any]
) -> None:
    """Whole tokens merge before their projections; drawn anew in each layer and at each step."""
    whole = Inputs(transformer)
    torch.testing.assert_close(whole.run(model), whole.expected, rtol=0, atol=1e-9)
    handle = apply_mame(transformer, **nested(fields), min_tokens=64)
    (patched,) = node.patch(model, **DEFAULT | inputs)
    for timestep in (900.0, 500.0):
        merged = Inputs(transformer, timestep)
        torch.testing.assert_close(merged.run(patched), merged.expected, rtol=0, atol=1e-9)
        assert (merged.expected - Inputs(transformer, timestep).run(model)).norm() > 0.1
    if not fields:
        assert (handle.config.merge, handle.config.keep) == ("qkv", 0.625)
    handle.remove()
    assert torch.equal(whole.run(model), Inputs(transformer).run(model))


def test_settings_of_each_layer_are_those_of_apply_mame(
    node: Any, transformer: Any, model: Model, tmp_path: Any, caplog: Any
) -> None:
    """A layer left whole, whole tokens in another, keys in a third."""
    caplog.set_level("INFO")
    for rules, logged in (
        ({"transformer_blocks.0": False}, "96 -> 60"),
        (
            {"*.0.attn": {"keep": 0.25, "merge": "kv"}, "*.1.attn": {"keep": 0.5}},
            "96 -> 24, 96 -> 48",
        ),
    ):
        handle = apply_mame(transformer, merge="qkv", keep=0.625, min_tokens=64, layers=rules)
        found = handle.config.replace(made_for=handle.described)
        path = tmp_path / "settings.json"
        path.write_text(json.dumps(found.to_dict(given_only=True)), encoding="utf-8")
        (patched,) = node.patch(model, **DEFAULT, settings=str(path))
        merged = Inputs(transformer)
        got = patched.sample(merged.run)
        torch.testing.assert_close(got, merged.expected, rtol=0, atol=1e-9)
        handle.remove()
        line = caplog.messages[-1]
        assert line.replace(" tokens at 8 x 12", "") == f"MaMe merged {logged}"


def test_a_replaced_block_calls_ours_or_skips_it(
    node: Any, transformer: Any, model: Model, caplog: Any
) -> None:
    """Skip layer guidance leaves a block out; what another node does around a block stays."""
    inputs = Inputs(transformer)
    (patched,) = node.patch(model, **DEFAULT)
    options = patched.model_options["transformer_options"]
    merged = inputs.run(patched)

    def beside(change: Callable[..., Any]) -> Tensor:
        options["patches_replace"] = {"dit": {("double_block", 0): change}}
        return patched.sample(inputs.run)

    around = beside(lambda args, extra: extra["original_block"](args))
    assert torch.equal(around, merged)
    skipped = beside(lambda args, extra: args)
    assert not torch.equal(skipped, merged)
    assert caplog.messages == []
    options["patches_replace"] = {"dit": {}}


def test_another_nodes_attention_gets_merged_tokens(
    node: Any, transformer: Any, model: Model, caplog: Any
) -> None:
    """Sparse attention, say: the two go together, and the log says so."""
    caplog.set_level("INFO")
    inputs, shapes = Inputs(transformer), []

    def other(function: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shapes.append((q.shape[1], k.shape[1], kwargs["mask"] is not None))
        result: Tensor = function(q, k, v, *args, **kwargs)
        return result

    (patched,) = node.patch(model, **DEFAULT)
    merged = inputs.run(patched)
    patched.model_options["transformer_options"]["optimized_attention_override"] = other
    assert torch.equal(patched.sample(inputs.run), merged)
    assert shapes == [(7 + 60, 7 + 60, True)] * 2
    assert caplog.messages == [
        "MaMe merged 96 -> 60 tokens at 8 x 12; attention that another node has set is called with"
        " the merged keys"
    ]


def test_attention_that_does_not_reach_the_node_is_a_warning(
    node: Any, transformer: Any, model: Model, caplog: Any, monkeypatch: Any
) -> None:
    """Merged tokens then do not count as many as they stand for; what comes out is whole."""
    from tests.comfyui import interface

    forward = interface.JointBlock.forward

    def bypassed(self: Any, *args: Any, transformer_options: Any, **kwargs: Any) -> Any:
        return forward(self, *args, transformer_options={}, **kwargs)

    monkeypatch.setattr(interface.JointBlock, "forward", bypassed)
    (patched,) = node.patch(model, **DEFAULT)
    inputs = Inputs(transformer)
    got = patched.sample(inputs.run)
    assert got.shape == inputs.expected.shape
    assert caplog.messages == [
        "MaMe neither corrects nor weighs merged keys: another node has put its attention instead"
        " of the engine's"
    ]


def test_a_compiled_model_is_one_graph_and_logs_what_merged(
    node: Any, transformer: Any, model: Model, caplog: Any
) -> None:
    """At every run, not only at the one that compiled it."""
    from torch._dynamo.testing import CompileCounter

    caplog.set_level("INFO")
    counter = CompileCounter()
    torch._dynamo.reset()
    inputs = Inputs(transformer)
    values = DEFAULT | {"mode": "keep", "keep": 0.25, "merge": QUERIES}
    expected = inputs.run(node.patch(model, **values)[0])
    compiled = Model(torch.compile(model.network, backend=counter, fullgraph=True))
    (patched,) = node.patch(compiled, **values)
    for _ in range(2):
        torch.testing.assert_close(patched.sample(inputs.run), expected, rtol=0, atol=1e-9)
    assert counter.frame_count == 1
    assert caplog.messages == ["MaMe merged 96 -> 24 tokens at 8 x 12"] * 2
