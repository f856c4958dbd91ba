"""The node in ComfyUI itself, if MAME_COMFYUI names a checkout.

Tiny models of its own classes, its own sampler and nodes.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from mame_sd import apply_mame, embedded_model_path
from tests.comfyui.engine import (
    HIDDEN,
    OTHER_CALLS,
    OTHER_MODELS,
    TINY,
    call,
    embedded_transformer,
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


@pytest.mark.parametrize("name", HIDDEN)
def test_a_refused_models_attention_is_handed_to_no_node(node: Any, name: str) -> None:
    """Check the reason for refusing it: an override of another node sees none of its attention."""
    skip_other(name, OTHER_MODELS)
    if not hasattr(engine().supported_models, HIDDEN[name].config):
        pytest.skip(f"this engine has no {name} yet")
    model, seen = patcher(name), []

    def override(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        seen.append(args)
        return function(*args, **kwargs)

    assert torch.isfinite(call(model, name, {"optimized_attention_override": override})).all()
    assert seen == []
    with pytest.raises(ValueError, match=f"{name} does not merge, since ComfyUI lets no"):
        applied(node, model)


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


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "keep": {"keep": 0.4, "mlp_keep": 0.25, "min_tokens": 256},
    "file": {"keep": 0.25, "layers": {"*blocks.0": {"keep": 0.5, "mlp_keep": 0.125}}},
}


def inputs_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the node's inputs for these settings: by mode, or by a file of single layers."""
    if name != "file":
        return {"mode": name, **SETTINGS[name]}
    path = folder / "settings.json"
    path.write_text(json.dumps(SETTINGS[name]), encoding="utf-8")
    return {"settings": str(path)}


def of_both(patched: Any, model: Any, theirs: Any, t: Tensor) -> list[Tensor]:
    """Return the outputs of ComfyUI's SD3 and of diffusers' for the same random arguments."""
    seen: list[Any] = []
    hook = model.model.diffusion_model.register_forward_hook(
        lambda _, args, kwargs, output: seen.append((args, kwargs, output)), with_kwargs=True
    )
    generator = torch.Generator().manual_seed(0)
    x, text, y = (
        torch.randn(2, *shape, generator=generator) for shape in ((4, 64, 64), (77, 256), (256,))
    )
    call(patched, "SD3", x=x, c_crossattn=text, y=y, t=t)
    hook.remove()
    (((x, t, *_), kwargs, output),) = seen
    pooled = {"pooled_projections": kwargs["y"]}
    with torch.no_grad():
        expected = theirs(x, encoder_hidden_states=text, timestep=t[:1], **pooled).sample
    return [output, expected]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_embedded_transformer_is_that_of_apply_mame(
    node: Any, settings: str, tmp_path: Path
) -> None:
    """Drawn anew at each step, with one share and with those of single layers."""
    theirs = SD3Transformer2DModel.from_pretrained(
        embedded_model_path("transformer"), subfolder="transformer"
    )
    model = embedded_transformer()
    sigmas = [model.model.model_sampling.sigma(torch.tensor([t, t])) for t in (900, 500)]
    whole = of_both(model, model, theirs, sigmas[1])
    apply_mame(theirs, **SETTINGS[settings])
    patched = applied(node, model, **{"min_tokens": 0, **inputs_of(settings, tmp_path)})
    merged = [of_both(patched, model, theirs, sigma) for sigma in sigmas]
    for output, expected in (whole, *merged):
        assert (output - expected).norm() < 1e-4 * expected.norm()
    assert (merged[1][0] - whole[0]).norm() > 1e-3 * whole[0].norm()


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
