"""Test apply_mame under torch.compile, inference mode and gradient checkpointing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from mame_sd import apply_mame
from mame_sd.compat import COMPILES
from mame_sd.core import groups
from tests.builders.layers import CONFIGS, attention, tokens
from tests.builders.tiny import one_level_unet, unet_inputs


def test_by_tau_a_graph_breaks_and_stays_right(graphs: Counter[str]) -> None:
    attn = attention()
    apply_mame(attn, min_tokens=1, **CONFIGS["tau"])
    with torch.no_grad():
        expected = attn(tokens())
        torch.testing.assert_close(torch.compile(attn, backend="eager")(tokens()), expected)
    assert graphs["unique_graphs"] > 1 or not COMPILES


@pytest.mark.compiles
def test_steps_are_one_graph_with_rules_where_a_forward_is_compiled_under_the_hooks(
    graphs: Counter[str],
) -> None:
    unet = one_level_unet()
    handle = apply_mame(unet, keep=0.25, min_tokens=40, layers={"*.1.attn1": {"keep": 0.5}})
    steps = [{**unet_inputs(unet), "timestep": torch.tensor(t)} for t in (999, 500, 20)]
    with torch.no_grad():
        expected = [unet(**step).sample for step in steps]
        assert [layer.share for layer in handle.report().layers] == [0.25, 0.5]
        unet.forward = torch.compile(unet.forward, backend="eager", fullgraph=True)
        for step, want in zip(steps, expected, strict=True):
            torch.testing.assert_close(unet(**step).sample, want)
    assert graphs["unique_graphs"] == 1


@pytest.mark.usefixtures("graphs")
def test_applying_to_a_compiled_model_takes_effect() -> None:
    attn, x = attention(), tokens()
    with torch.no_grad():
        before = attn(x)
        compiled = torch.compile(attn, backend="eager")
        assert torch.equal(compiled(x), before)
        with apply_mame(attn, tau=0.3, min_tokens=1):
            hooked = attn(x)
            torch.testing.assert_close(compiled(x), hooked)
        assert not torch.equal(hooked, before)
        assert torch.equal(compiled(x), before)


@torch.no_grad()
def test_an_exported_model_merges_at_every_step_and_counts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unet = one_level_unet(transformer_layers_per_block=1)
    handle = apply_mame(unet, keep=0.5, min_tokens=40)
    steps = [
        {**unet_inputs(unet), "timestep": torch.tensor(t), "return_dict": False} for t in (999, 20)
    ]
    expected = [unet(**inputs)[0] for inputs in steps]
    before = handle.report().to_dict()
    groups._cached_tensors.cache_clear()  # as in a process that exports before it runs
    monkeypatch.setattr(groups, "_Compiled", type("None", (), {}))
    # As AOTInductor does: graphs that change a tensor are refused.
    exported = torch.export.export(unet, (), steps[0], strict=False).run_decompositions({})
    for inputs, want in zip(steps, expected, strict=True):
        torch.testing.assert_close(exported.module()(**inputs)[0], want)
    assert handle.report().to_dict() == before
