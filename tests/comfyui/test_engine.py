"""The node in ComfyUI itself, if MAME_COMFYUI names a checkout.

Tiny models of its own classes, its own sampler and nodes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.comfyui.engine import (
    OTHER_CALLS,
    OTHER_MODELS,
    TINY,
    call,
    engine,
    needs_engine,
    patcher,
    sampled,
    skip_other,
)
from tests.comfyui.interface import applied
from tests.comfyui.recorded import CALLS

pytestmark = needs_engine
KEEP, TAU = {"keep": 0.25}, {"mode": "tau", "tau": 0.5}
UNETS = ("SD 1.5", "SDXL")


def of_engine(name: str) -> Any:
    if not hasattr(engine().supported_models, TINY[name].config):
        pytest.skip(f"this engine has no {name} yet")
    skip_other(name, OTHER_MODELS)
    model = patcher(name)
    if any(
        getattr(b, "flipped_img_txt", False)
        for b in getattr(model.model.diffusion_model, "double_blocks", ())
    ):
        pytest.skip(f"this engine's {name} is refused")
    return model


def layout(package: Any, model: Any) -> Any:
    models = importlib.import_module(f"{package.__name__}.comfyui.models")
    return models.layout_of(model.model.diffusion_model)[1]


def shape_of(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("name", [name for name in TINY if name not in UNETS])
def test_the_engine_calls_attention_as_recorded(name: str) -> None:
    skip_other(name, OTHER_CALLS)
    model = of_engine(name)
    seen = []

    def override(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        named = {
            key: shape_of(value) for key, value in kwargs.items() if key != "transformer_options"
        }
        assert named.pop("_inside_attn_wrapper")
        seen.append((*map(shape_of, args[:3]), tuple(map(shape_of, args[3:])), named))
        return function(*args, **kwargs)

    call(model, name, {"optimized_attention_override": override})
    kinds = [base.__name__ for base in type(model.model.diffusion_model).__mro__]
    known = [
        (one.q, one.k, one.v, one.args, one.kwargs) for one in CALLS.values() if one.model in kinds
    ]
    assert seen
    assert [one for one in seen if one not in known] == []


@pytest.mark.parametrize("name", TINY)
def test_every_family_merges_and_leaves_its_model_as_it_is(
    package: Any, node: Any, name: str
) -> None:
    model = of_engine(name)
    before = call(model, name)
    values: list[dict[str, Any]] = [{}, {"keep": 1.0, "mlp_keep": 0.25}]
    if not layout(package, model).mlps:
        with pytest.raises(ValueError, match="whose MLPs the node does not restore; set 1"):
            applied(node, model, **values.pop())
    for given in values:
        merged = call(applied(node, model, **given), name)
        assert torch.equal(call(model, name), before)
        assert 1e-6 < (merged - before).norm() / before.norm() < 0.5
    if name in UNETS:
        same = call(applied(node, model, mode="tau", tau=1.0), name)
        close = {"rtol": 1e-4, "atol": 1e-4 * float(before.abs().max())}
        torch.testing.assert_close(same, before, **close)


def extras(name: str, node: str) -> Any:
    """Return a node of the engine's own by module and class, as the engine calls it."""
    engine()
    found = getattr(importlib.import_module(f"comfy_extras.{name}"), node)
    if hasattr(found, "execute"):
        return lambda *args: (
            found.execute(*args).args[0] if node != "HyperTile" else found.execute(*args)[0]
        )
    return lambda *args: getattr(found(), found.FUNCTION)(*args)[0]


OTHERS = {
    "PAG": ("nodes_pag", "PerturbedAttentionGuidance", (3.0,)),
    "SAG": ("nodes_sag", "SelfAttentionGuidance", (0.5, 2.0)),
    "ToMe": ("nodes_tomesd", "TomePatchModel", (0.3,)),
    "HyperTile": ("nodes_hypertile", "HyperTile", (64, 2, 0, False)),
}


@pytest.mark.parametrize("values", [KEEP, TAU], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_beside_the_engines_own_nodes_in_both_orders(
    node: Any, name: str, values: dict[str, Any]
) -> None:
    module, kind, given = OTHERS[name]
    other = extras(module, kind)

    def run(model: Any) -> Tensor:
        torch.manual_seed(0)  # ToMe and HyperTile draw from the global generator
        return sampled(model, latent=(4, 16, 16))

    first = run(other(applied(node, patcher("SD 1.5"), **values), *given))
    second = run(applied(node, other(patcher("SD 1.5"), *given), **values))
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)
    assert not torch.equal(first, run(patcher("SD 1.5")))


def compiled(model: Any) -> Any:
    """Compile as TorchCompileModel does (its inductor needs a C++ compiler and minutes)."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    model = model.clone()
    options = {
        "guard_filter_fn": lambda entries: [
            "transformer_options" not in entry.name for entry in entries
        ]
    }
    set_torch_compile_wrapper(model=model, backend="aot_eager", options=options)
    return model


@pytest.mark.parametrize("name", ["SD 1.5", "Flux", "SD3"])
def test_compiled_it_adds_no_graph_and_no_break(node: Any, name: str, caplog: Any) -> None:
    """MLPs are not restored in a compiled model, which the log says."""
    from torch._dynamo.utils import counters

    model, counts = patcher(name), []
    caplog.set_level("INFO", logger="mame-sd")
    orders = [
        compiled,
        lambda one: compiled(applied(node, one, mlp_keep=0.25)),
        lambda one: applied(node, compiled(one), mlp_keep=0.25),
    ]
    eager = [sampled(model, name), *[sampled(applied(node, model), name)] * 2]
    for order, expected in zip(orders, eager, strict=True):
        torch._dynamo.reset()
        counters.clear()
        torch.testing.assert_close(sampled(order(model), name), expected, rtol=1e-3, atol=1e-3)
        counts.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    assert counts == [counts[0]] * 3
    assert "MLPs are not restored in a compiled model" in caplog.text
