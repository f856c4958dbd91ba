"""The node in ComfyUI itself, where MAME_COMFYUI names a checkout: tiny models of its own classes,
its own sampler and nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import (
    AuraFlowTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from torch import Tensor

from mame_sd import apply_mame, embedded_model_path
from tests.builders.settings import nested
from tests.comfyui.engine import (
    HIDDEN,
    TINY,
    auraflow,
    call,
    embedded_transformer,
    embedded_unet,
    engine,
    needs_engine,
    patcher,
    sampled,
    sd3,
)
from tests.comfyui.recorded import CALLS

pytestmark = needs_engine
KEYS, QUERIES = "keys and values", "queries too"
UNETS = ("SD 1.5", "SDXL")


def applied(node: Any, model: Any, merge: str = KEYS, **changes: Any) -> Any:
    values = {"mode": "keep", "keep": 0.25, "tau": 0.8, "merge": merge, "min_tokens": 64} | changes
    return node.patch(model, **values)[0]


def of_engine(name: str) -> Any:
    model = patcher(name)
    if any(
        getattr(b, "flipped_img_txt", False)
        for b in getattr(model.model.diffusion_model, "double_blocks", ())
    ):
        pytest.skip(f"this engine's {name} is refused")
    return model


def shape_of(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("name", [name for name in TINY if name not in UNETS])
def test_the_engine_calls_attention_as_recorded(name: str) -> None:
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
    """Its reason: an override of another node, which sees every other model's attention, sees
    nothing of this one's.
    """
    model, seen = patcher(name), []

    def override(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        seen.append(args)
        return function(*args, **kwargs)

    assert torch.isfinite(call(model, name, {"optimized_attention_override": override})).all()
    assert seen == []
    with pytest.raises(ValueError, match=f"{name} does not merge, since ComfyUI hands its"):
        applied(node, model)


@pytest.mark.parametrize("name", TINY)
def test_every_family_merges_and_leaves_its_model_as_it_is(
    node: Any, name: str, caplog: Any
) -> None:
    model = of_engine(name)
    before = call(model, name)
    merged, plain = (call(applied(node, model, correct=correct), name) for correct in (True, False))
    same = call(applied(node, model, mode="tau", tau=1.0), name)
    assert torch.equal(call(model, name), before)
    corrected, lost = ((output - before).norm() / before.norm() for output in (merged, plain))
    assert 1e-5 < lost < 1
    if name == "OmniGen 2":  # queries of several heads share keys, which are not corrected
        assert corrected == lost
    else:
        assert 1e-6 < corrected < lost
    torch.testing.assert_close(same, before, rtol=1e-4, atol=1e-4 * float(before.abs().max()))


@pytest.mark.parametrize("name", ["Flux", "Qwen-Image"])
def test_reference_images_stay_whole(node: Any, name: str) -> None:
    """Kontext and Qwen-Image-Edit append them to the image's tokens."""
    model, lengths = patcher(name), []

    def override(
        function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        lengths.append((q, k))
        return function(q, k, v, *args, **kwargs)

    reference = torch.randn(2, *TINY[name].latent[:-2], 8, 12)
    for one in (model, applied(node, model)):
        call(one, name, {"optimized_attention_override": override}, ref_latents=[reference])
    (_, whole), (_, merged) = lengths[0], lengths[len(lengths) // 2]
    length = 1 if whole.dim() == 3 else 2
    assert whole.shape[length] == 7 + 96 + 24
    assert merged.shape[length] == 7 + 24 + 24
    assert torch.equal(whole.narrow(length, 103, 24), merged.narrow(length, 31, 24))
    assert torch.equal(whole.narrow(length, 0, 7), merged.narrow(length, 0, 7))


@torch.no_grad()
@pytest.mark.parametrize(
    ("fields", "inputs"),
    [
        ({"merge": "kv"}, {}),
        ({"merge": "kv", "correct": False}, {"correct": False}),
        ({"keep": 0.4}, {"keep": 0.4}),
        ({"tau": 0.8}, {"mode": "tau"}),
        ({"merge": "qkv"}, {"merge": QUERIES}),
        ({}, {"settings": str(embedded_model_path() / "mame.json")}),
    ],
    ids=str,
)
def test_the_embedded_unet_is_that_of_apply_mame(
    node: Any, fields: dict[str, Any], inputs: dict[str, Any]
) -> None:
    """Bit by bit, drawn anew at each step: the library's uniform default first, at last the
    settings by layer that lie beside its weights.
    """
    unet = UNet2DConditionModel.from_pretrained(embedded_model_path(), subfolder="unet")
    apply_mame(unet, **nested(fields))
    model = embedded_unet()
    patched = applied(node, model, min_tokens=1024, **inputs)
    seen: list[Any] = []
    model.model.diffusion_model.register_forward_hook(
        lambda _, args, output: seen.extend([*args, output])
    )
    generator = torch.Generator().manual_seed(0)
    x, text = (
        torch.randn(2, 4, 64, 64, generator=generator),
        torch.randn(2, 5, 192, generator=generator),
    )
    for timestep in (900, 500):
        seen.clear()
        sigmas = model.model.model_sampling.sigma(torch.tensor([timestep, timestep]))
        call(patched, "SD 1.5", x=x, t=sigmas, c_crossattn=text)
        scaled, times, got = seen
        assert times.tolist() == [timestep, timestep]
        assert torch.equal(got, unet(scaled, timestep, text).sample)


def calls_of_both(patched: Any, model: Any, theirs: Any, name: str, **changes: Any) -> list[Tensor]:
    """The output of ComfyUI's model and that of diffusers', of the same arguments."""
    seen: list[Any] = []
    hook = model.model.diffusion_model.register_forward_hook(
        lambda _, args, kwargs, output: seen.append((args, kwargs, output)), with_kwargs=True
    )
    call(patched, name, t=torch.full((2,), 0.5), **changes)
    hook.remove()
    (((x, t, *_), given, output),) = seen
    pooled = {"pooled_projections": given["y"]} if "y" in given else {}
    with torch.no_grad():
        expected = theirs(x, encoder_hidden_states=given["context"], timestep=t, **pooled).sample
    return [output, expected]


WHOLE_TOKENS = {
    "default": ({"merge": "qkv", "keep": 0.625}, {"mode": "default"}),
    "keys": ({"merge": "kv", "keep": 0.25}, {}),
    "tau": ({"merge": "qkv", "tau": 0.5}, {"mode": "tau", "tau": 0.5, "merge": QUERIES}),
    "uncorrected": (
        {"merge": "qkv", "keep": 0.5, "correct": False},
        {"keep": 0.5, "merge": QUERIES, "correct": False},
    ),
}


@pytest.mark.parametrize("name", [*WHOLE_TOKENS, "file"])
def test_the_embedded_transformer_is_that_of_apply_mame(node: Any, name: str) -> None:
    """SD3's whole tokens too, and the settings by layer that lie beside its weights."""
    path = embedded_model_path("transformer")
    theirs = SD3Transformer2DModel.from_pretrained(path, subfolder="transformer")
    model, generator = embedded_transformer(), torch.Generator().manual_seed(0)
    x, text, pooled = (
        torch.randn(2, *shape, generator=generator) for shape in ((4, 64, 64), (77, 256), (256,))
    )
    given = {"x": x, "c_crossattn": text, "y": pooled}
    outputs = [calls_of_both(model, model, theirs, "SD3", **given)]
    fields, inputs = WHOLE_TOKENS.get(name, ({}, {"settings": str(path / "mame.json")}))
    apply_mame(theirs, **nested(fields))
    patched = applied(node, model, min_tokens=1024, **inputs)
    outputs.append(calls_of_both(patched, model, theirs, "SD3", **given))
    for output, expected in outputs:
        assert (output - expected).norm() < 1e-5 * expected.norm()
    (whole, _), (merged, _) = outputs
    assert (merged - whole).norm() > 1e-2 * whole.norm()


@pytest.mark.parametrize("name", WHOLE_TOKENS)
def test_sd35_and_auraflow_are_those_of_apply_mame(node: Any, name: str) -> None:
    """SD3.5's first block attends to the image alone too; AuraFlow's last ones hold text and image
    in one sequence.
    """
    torch.manual_seed(0)
    size = {"num_layers": 2, "attention_head_dim": 64, "num_attention_heads": 2}
    text = {"joint_attention_dim": 24, "caption_projection_dim": 128, "pos_embed_max_size": 12}
    pooled = {"pooled_projection_dim": 48, "in_channels": 16, "out_channels": 16}
    twice = {"dual_attention_layers": (0,), "qk_norm": "rms_norm", "sample_size": 24}
    own = {"in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 2, "sample_size": 24}
    own |= {"attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 24}
    own |= {"caption_projection_dim": 64, "out_channels": 4, "pos_embed_max_size": 144}
    models = {
        "SD3": SD3Transformer2DModel(**size, **text, **pooled, **twice),
        "AuraFlow": AuraFlowTransformer2DModel(**own),
    }
    sizes = {"depth": 2, "num_blocks": 2, "num_patches": 144, "pos_embed_max_size": 12}
    for kind, theirs in models.items():
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        weights = theirs.state_dict()
        ours = (
            sd3(weights, sizes, (0,))
            if kind == "SD3"
            else auraflow(weights, {"n_layers": 3, "n_double_layers": 1})
        )
        fields, inputs = WHOLE_TOKENS[name]
        apply_mame(theirs, **nested(fields), min_tokens=64)
        output, expected = calls_of_both(applied(node, ours, **inputs), ours, theirs, kind)
        assert (output - expected).norm() < 1e-4 * expected.norm(), kind


def extras(name: str, node: str) -> Any:
    """A node of the engine's own, by its module and class; as it is called by the engine."""
    import importlib

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


@pytest.mark.parametrize("merge", [KEYS, QUERIES])
@pytest.mark.parametrize("keep", [0.25, 0.75])
@pytest.mark.parametrize("name", OTHERS)
def test_beside_the_engines_own_nodes_in_both_orders(
    node: Any, name: str, keep: float, merge: str
) -> None:
    module, kind, values = OTHERS[name]
    other = extras(module, kind)

    def run(model: Any) -> Tensor:
        torch.manual_seed(0)  # ToMe and HyperTile draw from the global generator
        return sampled(model, latent=(4, 16, 16))

    first = run(other(applied(node, patcher("SD 1.5"), merge, keep=keep), *values))
    second = run(applied(node, other(patcher("SD 1.5"), *values), merge, keep=keep))
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)
    assert not torch.equal(first, run(patcher("SD 1.5")))


@pytest.mark.parametrize("merge", [KEYS, QUERIES])
def test_applied_twice_is_the_last_one(node: Any, merge: str) -> None:
    model = patcher("SD 1.5")
    twice = sampled(applied(node, applied(node, model, QUERIES, keep=0.5), merge))
    assert torch.equal(twice, sampled(applied(node, model, merge)))


def test_a_run_tells_what_merged_or_why_nothing_did(node: Any, caplog: Any) -> None:
    with caplog.at_level("INFO", logger="mame-sd"):
        sampled(applied(node, patcher("SD 1.5")))
        sampled(applied(node, patcher("SD 1.5"), min_tokens=4096))
    ours = [record.getMessage() for record in caplog.records if record.name == "mame-sd"]
    assert ours == [
        "MaMe merged 384 -> 96 tokens at 16 x 24, 96 -> 24 tokens at 8 x 12",
        (
            "MaMe merged nothing: 384 tokens are fewer than min_tokens=4096; 96 tokens are fewer"
            " than min_tokens=4096"
        ),
    ]


def test_start_and_end_percent(node: Any, caplog: Any) -> None:
    plain = sampled(patcher("SD 1.5"), steps=4)
    assert torch.equal(sampled(applied(node, patcher("SD 1.5"), start_percent=1.0), steps=4), plain)
    part = sampled(applied(node, patcher("SD 1.5"), start_percent=0.5), steps=4)
    whole = sampled(applied(node, patcher("SD 1.5")), steps=4)
    assert not torch.equal(part, plain)
    assert not torch.equal(part, whole)


def compiled(model: Any) -> Any:
    """As TorchCompileModel does it (whose backend is inductor, which needs a C++ compiler and
    minutes).
    """
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
def test_compiled_it_adds_no_graph_and_no_break(node: Any, name: str) -> None:
    """SD3 with its queries."""
    from torch._dynamo.utils import counters

    model, counts = patcher(name), []
    merge = QUERIES if name == "SD3" else KEYS
    orders = [
        compiled,
        lambda one: compiled(applied(node, one, merge)),
        lambda one: applied(node, compiled(one), merge),
    ]
    eager = [sampled(model, name), *[sampled(applied(node, model, merge), name)] * 2]
    for order, expected in zip(orders, eager, strict=True):
        torch._dynamo.reset()
        counters.clear()
        torch.testing.assert_close(sampled(order(model), name), expected, rtol=1e-3, atol=1e-3)
        counts.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    assert counts == [counts[0]] * 3


def test_compiled_it_merges_at_every_step_or_says_so(node: Any) -> None:
    model = applied(node, compiled(patcher("SD 1.5")), start_percent=0.5)
    with pytest.raises(
        ValueError, match=r"expected 0 and 1 beside TorchCompileModel.*, got 0.5 and 1.0"
    ):
        sampled(model)


def test_threads_share_a_node(node: Any) -> None:
    """Several devices do: one thread each, with other sizes."""
    model = applied(node, patcher("SD 1.5"), QUERIES)
    latents = [torch.randn(2, 4, *size) for size in ((16, 24), (16, 16), (12, 20), (24, 24))]
    expected = [call(model, "SD 1.5", x=latent) for latent in latents]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(8):
            if not torch.equal(call(model, "SD 1.5", x=latents[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_model_that_does_not_merge_is_refused(node: Any) -> None:
    comfy = engine()
    config = comfy.supported_models.Stable_Cascade_C(
        {"c_cond": 32, "c_r": 16, "c_hidden": [32, 32], "nhead": [2, 2]}
    )
    config.custom_operations = comfy.ops.disable_weight_init
    model = comfy.model_base.StableCascade_C(config, device="cpu")
    cascade = comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))
    with pytest.raises(ValueError, match="Stable Cascade does not merge, since the node"):
        applied(node, cascade)
