"""apply_mame under torch.compile, inference mode and gradient checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import nn

from mame_sd import MaMeAttnProcessor, apply_mame, mame
from mame_sd.core import cells
from tests.builders.layers import CONFIGS, attention, tokens
from tests.builders.tiny import (
    one_level_unet,
    run_unet,
    tiny_unet,
    unet_inputs,
)
from tests.matrix.transformers import ROWS

MERGING = {"tau": 0.2, "min_tokens": 40}


@pytest.mark.parametrize("fields", [CONFIGS["tau"], CONFIGS["keep"]], ids=["tau", "keep"])
def test_compiled_calls_are_counted_without_recompiling(fields: dict[str, Any]) -> None:
    torch._dynamo.reset()
    attn: Attention = attention()
    inputs = [
        tokens(),
        *(tokens().roll(k, 0) * torch.linspace(0.1, k, 64)[:, None] + k for k in (1, 2, 3)),
    ]
    handle = apply_mame(attn, min_tokens=1, **fields)
    with torch.no_grad():
        expected = [attn(x) for x in inputs]
        before = handle.report().layers[0]
        handle.reset()
        compiled = torch.compile(attn, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(inputs[0]), expected[0])
        with torch.compiler.set_stance("fail_on_recompile"):
            for x, y in zip(inputs[1:], expected[1:], strict=True):
                torch.testing.assert_close(compiled(x), y)
    assert handle.report().layers[0] == before
    assert before.calls == 4
    assert before.tokens_in == 64


def test_a_processor_that_was_never_called_before_compiles_once() -> None:
    class Mine(AttnProcessor2_0):
        """A kind of processor that nothing has looked at yet."""

    torch._dynamo.reset()
    attn, x = attention(), tokens()
    attn.set_processor(MaMeAttnProcessor(keep=0.5, min_tokens=40, inner=Mine()))
    with torch.no_grad():
        compiled = torch.compile(attn, backend="eager", fullgraph=True)
        first = compiled(x)
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(compiled(x), first)
        torch.testing.assert_close(attn(x), first)


def test_steps_are_one_graph_where_a_forward_is_compiled_under_the_hooks() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    unet = one_level_unet()
    apply_mame(unet, keep=0.25, min_tokens=40)
    steps = [{**unet_inputs(unet), "timestep": torch.tensor(t)} for t in (999, 500, 20)]
    with torch.no_grad():
        expected = [unet(**step).sample for step in steps]
        unet.forward = torch.compile(unet.forward, backend="eager", fullgraph=True)
        torch.testing.assert_close(unet(**steps[0]).sample, expected[0])
        with torch.compiler.set_stance("fail_on_recompile"):
            for step, want in zip(steps[1:], expected[1:], strict=True):
                torch.testing.assert_close(unet(**step).sample, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ["Stable Diffusion 3.5", "Qwen-Image"])
def test_transformers_are_one_graph_each(name: str) -> None:
    """Beside the small one of the hook that reads the step. The matrix compiles UNets, Flux and
    Wan.
    """
    row = next(row for row in ROWS if row.name == name)
    model = row.build()
    for kind, blocks in model.named_children():
        if isinstance(blocks, nn.ModuleList) and "3.5" not in name:  # whose last is another
            setattr(model, kind, blocks[:1])
    handle = apply_mame(model, keep=0.5, min_tokens=60)
    expected = row.run(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(row.run(model), expected, rtol=1e-4, atol=1e-4)
    with torch.compiler.set_stance("fail_on_recompile"):
        row.run(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert all(layer.merged for layer in handle.report().layers)


def test_timesteps_that_are_numbers_make_a_few_graphs() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    unet = one_level_unet()
    apply_mame(unet, keep=0.25, min_tokens=40)
    with torch.no_grad():
        compiled: Any = torch.compile(unet, backend="eager", fullgraph=True)
        for t in (999, 700, 400):
            step = {**unet_inputs(unet), "timestep": t}
            torch.testing.assert_close(compiled(**step).sample, unet(**step).sample)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


@pytest.mark.parametrize(
    ("fields", "capture", "graphs"),
    [(CONFIGS["keep"], False, 1), (CONFIGS["tau"], False, None), (CONFIGS["tau"], True, 1)],
    ids=["keep", "tau", "tau-captured"],
)
def test_graphs_of_a_compiled_layer(
    fields: dict[str, Any], capture: bool, graphs: int | None
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    attn = attention()
    apply_mame(attn, min_tokens=1, **fields)
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=capture):
        expected = attn(tokens())
        torch.testing.assert_close(torch.compile(attn, backend="eager")(tokens()), expected)
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert made == graphs if graphs else made > 1


def test_works_in_inference_mode_and_out_of_it() -> None:
    unet = tiny_unet()
    with torch.inference_mode():
        handle = apply_mame(unet, **MERGING)
        inside = run_unet(unet)
        handle.reset()
    assert torch.equal(run_unet(unet), inside)
    handle.reset()


def gradients(
    unet: Any, inputs: dict[str, Any], before_backward: Any = None
) -> list[list[torch.Tensor]]:
    """Those of all parameters, without and with checkpointing; `before_backward` is called with the
    UNet in between.
    """
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            unet.enable_gradient_checkpointing()
        unet.zero_grad()
        loss = unet(**inputs).sample.square().mean()
        if before_backward is not None:
            before_backward(unet)
        loss.backward()
        found.append([p.grad.clone() for p in unet.parameters() if p.grad is not None])
    assert len(found[0]) == len(list(unet.parameters()))
    return found


def test_gradients_under_checkpointing() -> None:
    unet = tiny_unet().train()
    apply_mame(unet, **MERGING)
    plain, checkpointed = gradients(unet, unet_inputs(unet, height=8, width=24))
    torch.testing.assert_close(checkpointed, plain)


def test_a_pass_without_gradients_does_not_change_what_checkpoints_compute_again() -> None:
    unet = tiny_unet().train()
    apply_mame(unet, keep=0.25, min_tokens=40)
    other_step = {**unet_inputs(unet), "timestep": torch.tensor(20)}

    @torch.no_grad()
    def pass_of_another_step(unet: Any) -> None:
        unet(**other_step)

    inputs = unet_inputs(unet)
    _, alone = gradients(unet, inputs)
    _, checkpointed = gradients(unet, inputs, before_backward=pass_of_another_step)
    torch.testing.assert_close(checkpointed, alone)


def test_repeated_blocks_share_one_graph_a_size() -> None:
    torch._dynamo.reset()
    unet = tiny_unet()
    unet.set_attn_processor(MaMeAttnProcessor(keep=0.4, min_tokens=40))
    expected = run_unet(unet)
    unet.compile_repeated_blocks(backend="eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    torch.testing.assert_close(run_unet(unet), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # of 7 blocks, on two levels


def test_applying_to_a_compiled_model_takes_effect() -> None:
    torch._dynamo.reset()
    attn, x = attention(), tokens()
    with torch.no_grad():
        before = attn(x)
        compiled = torch.compile(attn, backend="eager")
        assert torch.equal(compiled(x), before)
        with mame(attn, tau=0.3, min_tokens=1):
            hooked = attn(x)
            torch.testing.assert_close(compiled(x), hooked)
        assert not torch.equal(hooked, before)
        assert torch.equal(compiled(x), before)


@torch.no_grad()
def test_an_exported_model_merges_at_every_step_and_counts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unet = one_level_unet()
    handle = apply_mame(unet, keep=0.5, min_tokens=40)
    steps = [
        {**unet_inputs(unet), "timestep": torch.tensor(t), "return_dict": False} for t in (999, 20)
    ]
    expected = [unet(**inputs)[0] for inputs in steps]
    before = handle.report().to_dict()
    cells._made.cache_clear()  # as in a process that exports before it runs
    monkeypatch.setattr(cells, "_Compiled", type("None", (), {}))
    # As AOTInductor does: graphs that change a tensor are refused.
    exported = torch.export.export(unet, (), steps[0], strict=False).run_decompositions({})
    for inputs, want in zip(steps, expected, strict=True):
        torch.testing.assert_close(exported.module()(**inputs)[0], want)
    assert handle.report().to_dict() == before
