"""Test restored MLPs and blocks (`mlp_keep`, `block_keep`), next to other changes of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module
from diffusers import Transformer2DModel
from diffusers.hooks import FirstBlockCacheConfig, TaylorSeerCacheConfig
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import AttnProcessor2_0
from optimum.quanto import freeze, qint8, quantize
from peft import LoraConfig
from torch import Tensor, nn

from mame_sd import MaMeAttnProcessor, MaMeHandle, apply_mame, remove_mame
from mame_sd.core.restore import cells_and_count, choose_tokens
from mame_sd.diffusion import fused_mlp
from mame_sd.diffusion.context import Tokens
from mame_sd.diffusion.fused_mlp import NOT_PLAIN, REPLACED
from mame_sd.diffusion.restoring import AS_MANY, BY_TOKEN, CACHED, GATED, SEVERAL, MLPHook
from mame_sd.diffusion.rows import Rows
from tests.builders.caches import PYRAMID, faster, one_run
from tests.builders.pipelines import once
from tests.builders.tiny import (
    gligen_inputs,
    one_level_unet,
    run_unet,
    seeded,
    tiny_pipeline,
    tiny_unet,
    unet_inputs,
)
from tests.builders.transformers import TEXT, normal, run
from tests.matrix.features import load_ip_adapter
from tests.matrix.models.registry import MODELS, tiny_model
from tests.matrix.models.restored import SETTINGS, Restored, restoring

KINDS = [*SETTINGS]


def restored(model: Any, kind: str, **fields: Any) -> MaMeHandle:
    """Apply restoring to a quarter of the tokens, keys unmerged."""
    return apply_mame(model, **{"keep": 1, "min_tokens": 1, SETTINGS[kind]: 0.25, **fields})


def checked(handle: MaMeHandle, forward: Callable[[], Any]) -> list[Restored]:
    """Return the calls of a forward that are restored, each of which is exact."""
    with torch.no_grad(), restoring(handle) as calls:
        forward()
    for call in calls:
        call.check()
    return calls


def reasons(handle: MaMeHandle, kind: str) -> set[str]:
    """Return why modules of a kind were left alone, "" for those that were restored."""
    stats = [hook.stats for _, hook in handle.restored if hook.stats.kind == kind]
    return {one.last_reason or "" for one in stats}


def feed_forwards(model: nn.Module) -> list[FeedForward]:
    return [module for module in model.modules() if isinstance(module, FeedForward)]


@pytest.mark.parametrize("kind", KINDS)
def test_removal_is_exact_and_the_report_counts_each_layer(kind: str) -> None:
    unet = tiny_unet()
    before = run_unet(unet)
    handle = restored(unet, kind)
    assert len(checked(handle, lambda: run_unet(unet))) == 7
    layers = [layer for layer in handle.report().layers if layer.kind == kind]
    assert len(layers) == 7
    assert {layer.share for layer in layers} == {0.25}
    assert not torch.equal(run_unet(unet), before)
    handle.active = False
    assert torch.equal(run_unet(unet), before)
    handle.active = True
    handle.remove()
    assert torch.equal(run_unet(unet), before)
    assert all("forward" not in vars(module) for module in unet.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_rules_name_mlps_and_blocks(kind: str) -> None:
    unet = tiny_unet()
    path = "mid_block.attentions.0.transformer_blocks.0" + (".ff" if kind == "mlp" else "")
    rules = {path: {SETTINGS[kind]: 0.5}, "up_blocks.*": False}
    handle = restored(unet, kind, layers=rules)
    calls = {call.hook.stats.name: call for call in checked(handle, lambda: run_unet(unet))}
    assert {name.partition(".")[0] for name in calls} == {"down_blocks", "mid_block"}
    shares = {name: call.chosen.tokens_kept / call.chosen.tokens_in for name, call in calls.items()}
    assert {share for name, share in shares.items() if name != path} == {0.25}
    assert shares[path] == 0.5
    for pattern in ("*.attn1", "*.attn2" if kind == "mlp" else "*.attn1"):
        with pytest.raises(ValueError, match=r"^layers: "):
            restored(unet, kind, layers={pattern: {SETTINGS[kind]: 0.5}})


@pytest.mark.parametrize(
    "name", ["UNet2DConditionModel", "SD3Transformer2DModel", "FluxTransformer2DModel"]
)
def test_keys_merge_in_restored_blocks(name: str) -> None:
    model, inputs = tiny_model(name)
    handle = restored(model, "block", keep=0.5, mlp_keep=0.25)
    calls = checked(handle, lambda: run(inputs, model))
    layers = handle.report().layers
    assert {layer.kind for layer in layers if layer.merged} == {"attention", "block"}
    assert len(calls) == sum(layer.kind == "block" for layer in layers)


@pytest.mark.filterwarnings("ignore:.*no layer merges")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("UNet2DConditionModel", "mlp"),
        ("SD3Transformer2DModel", "block"),
        ("FluxTransformer2DModel", "mlp"),  # single-stream blocks fuse it with attention
    ],
)
def test_the_report_estimates_errors_on_demand(name: str, kind: str) -> None:
    model, inputs = MODELS[name].build(), MODELS[name].inputs()
    handle = restored(model, kind)

    def errors() -> set[bool]:
        return {it.error is None for it in handle.report().layers if it.kind == kind and it.merged}

    before = run(inputs, model)
    assert errors() == {True}
    with handle.estimating_errors():
        assert torch.equal(run(inputs, model), before)
    assert errors() == {False}
    assert all(0 < it.error < 2 for it in handle.report().layers if it.kind == kind)
    assert "estimated error 0." in str(handle.report())
    with handle.estimating_errors(), handle.using(**{SETTINGS[kind]: 0.5}):
        handle.reset()
        run(inputs, model)
    assert errors() == {False}
    nothing = pytest.raises(RuntimeError, match=r"^estimating_errors: expected a call that")
    for change in ({SETTINGS[kind]: 1}, {}):
        with nothing, handle.estimating_errors(), handle.using(**change):
            if change:
                run(inputs, model)


# ------------------------------------------------------------ what can't act


@pytest.mark.parametrize(
    ("name", "field", "why"),
    [
        ("UNet2DModel", "mlp_keep", "no MLP of its own is next to"),
        ("UNet2DModel", "block_keep", "no block is around"),
        ("PRXTransformer2DModel", "mlp_keep", "no MLP of its own"),
        ("ErnieImageTransformer2DModel", "block_keep", "its blocks take tokens before samples"),
        ("CosmosTransformer3DModel", "block_keep", "its blocks add positions"),
        ("Kandinsky6Transformer3DModel", "block_keep", "its blocks are called part by part"),
    ],
)
def test_settings_that_can_not_act_are_one_line(name: str, field: str, why: str) -> None:
    model = MODELS[name].build()
    for fields in ({field: 0.25}, {"layers": {"*": {field: 0.25}}}):
        with pytest.raises(ValueError, match=rf"^{field}: expected .* got {name}: {why}.*") as one:
            apply_mame(model, **fields)
        assert "\n" not in str(one.value)
    handle = apply_mame(model, keep=0.5)
    with pytest.raises(ValueError, match=f"^{field}: "):
        handle.set(**{field: 0.25})
    with pytest.raises(ValueError, match=f"^{field}: "), handle.using(**{field: 0.25}):
        pass
    apply_mame(model, **{field: 1})


@pytest.mark.parametrize("field", SETTINGS.values())
def test_a_processor_takes_no_setting_of_restoring(field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: expected none, got 0.25: .* use apply_mame"):
        MaMeAttnProcessor(**{field: 0.25})


# --------------------------------------------------------------------- masks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("QwenImageTransformer2DModel", "encoder_hidden_states_mask"),
        ("HunyuanVideoTransformer3DModel", "encoder_attention_mask"),
        ("Lumina2Transformer2DModel", "encoder_attention_mask"),
    ],
)
@pytest.mark.parametrize("seen", [torch.arange(TEXT) < 4, torch.arange(TEXT) >= TEXT - 4])
def test_padding_on_either_side_of_the_text(name: str, mask: str, kind: str, seen: Tensor) -> None:
    model, inputs = tiny_model(name)
    inputs[mask] = seen.expand(2, -1).to(inputs[mask].dtype)
    assert checked(restored(model, kind), lambda: run(inputs, model))


@pytest.mark.parametrize(
    ("name", "shape"), [("attention_mask", (2, 256)), ("encoder_attention_mask", (2, 256, 7))]
)
def test_a_mask_over_the_images_tokens(name: str, shape: tuple[int, ...]) -> None:
    """Self- or cross-attention of the block computes all queries, and the block is still exact."""
    unet, mask = one_level_unet(), torch.ones(shape)
    mask[:, 100:130].view(2, 30, -1)[..., 0] = 0
    inputs = {**unet_inputs(unet), name: mask}
    assert len(checked(restored(unet, "block"), lambda: unet(**inputs))) == 2


# ------------------------------------------------------- text next to the image

SHARED = ["CogView4Transformer2DModel", "GlmImageTransformer2DModel"]
CONCATENATED = ["CogVideoXTransformer3DModel", "CogView3PlusTransformer2DModel"]


def with_text(name: str, count: int) -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = tiny_model(name)
    batch, _, channels = inputs["encoder_hidden_states"].shape
    inputs["encoder_hidden_states"] = normal(batch, count, channels)
    return model, inputs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*SHARED, *CONCATENATED])
def test_text_that_is_longer_than_the_image_is_computed_in_full(name: str, kind: str) -> None:
    model, inputs = with_text(name, 300)  # 96 or 288 tokens of the image
    assert len(checked(restored(model, kind), lambda: run(inputs, model))) == 2


@pytest.mark.filterwarnings("ignore:.*no layer merges")
def test_text_of_as_many_tokens_as_the_image_ends_with_its_call() -> None:
    model, inputs = with_text(SHARED[0], 96)
    handle = restored(model, "block")
    assert not checked(handle, lambda: run(inputs, model))
    assert reasons(handle, "block") == {AS_MANY}
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, :TEXT]
    assert len(checked(handle, lambda: run(inputs, model))) == 2


@pytest.mark.parametrize("name", CONCATENATED)
def test_a_block_computes_the_mlp_of_image_and_text_on_its_rows(name: str) -> None:
    model, inputs = tiny_model(name)
    handle, counts = restored(model, "block"), []
    for block in model.transformer_blocks:
        block.ff.net[0].register_forward_pre_hook(lambda _, args: counts.append(args[0].shape[1]))
    run(inputs, model)
    tokens = handle.restored[0][1].layout().count
    assert counts == 2 * [tokens // 4 + inputs["encoder_hidden_states"].shape[1]]


# ------------------------------------------------ modules that others changed


class Normalising(AttnProcessor2_0):
    """Normalise over all queries, as a user's processor may (StyleAligned)."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[int] = []

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        query = attn.to_q(hidden_states)
        self.queries.append(query.shape[1])
        hidden_states = hidden_states / query.std(1, keepdim=True).mean(-1, keepdim=True)
        return super().__call__(attn, hidden_states, *args, **kwargs)


def test_a_processor_of_the_users_sees_all_queries_of_a_block() -> None:
    unet = one_level_unet()
    processor = Normalising()
    handle = restored(unet, "block")
    unet.set_attn_processor(processor)
    assert len(checked(handle, lambda: run_unet(unet))) == 2
    assert set(processor.queries) == {256}


class OwnMLP(FeedForward):
    """Derive a feed-forward under a name that doesn't tell what it is."""


class Odd(OwnMLP):
    """Derive it once more."""


@pytest.mark.parametrize("kind", KINDS)
def test_subclassed_and_wrapped_feed_forwards(kind: str) -> None:
    unet = one_level_unet()
    first, second = feed_forwards(unet)
    first.__class__ = Odd
    inner = second.forward
    second.forward = lambda *args, **kwargs: 2 * inner(*args, **kwargs)
    wrapped = run_unet(unet)
    handle = restored(unet, kind)
    assert len(checked(handle, lambda: run_unet(unet))) == 2
    outer = first.forward
    first.forward = lambda *args, **kwargs: 2 * outer(*args, **kwargs)
    assert len(checked(handle, lambda: run_unet(unet))) == 2
    handle.remove()
    del first.forward
    assert torch.equal(run_unet(unet), wrapped)


TARGETS = ["ff.net.0.proj", "ff.net.2", "to_out.0", "to_q"]


def add_lora(unet: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unet.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=TARGETS))


@pytest.mark.parametrize("kind", KINDS)
def test_a_lora_on_mlps_added_before_and_after(kind: str) -> None:
    unet = one_level_unet()
    before = run_unet(unet)
    handle = restored(unet, kind)
    without = run_unet(unet)
    add_lora(unet)
    assert len(checked(handle, lambda: run_unet(unet))) == 2
    assert not torch.equal(run_unet(unet), without)
    unet.delete_adapters("default")
    assert torch.equal(run_unet(unet), without)
    add_lora(unet)
    handle = restored(unet, kind)
    assert len(checked(handle, lambda: run_unet(unet))) == 2
    unet.delete_adapters("default")
    assert len(checked(handle, lambda: run_unet(unet))) == 2
    handle.remove()
    assert torch.equal(run_unet(unet), before)


FUSED = {
    "FluxTransformer2DModel": ("proj_mlp", "proj_out"),
    "Flux2Transformer2DModel": ("attn.to_qkv_mlp_proj", "attn.to_out"),
}


def fused_model(name: str) -> tuple[nn.Module, Callable[[], Tensor], Callable[[Any], int]]:
    """Return a model with single-stream blocks, a run of it, and a count of their calls."""
    model, inputs = tiny_model(name)

    def single(handle: MaMeHandle) -> int:
        calls = checked(handle, lambda: model(**inputs))
        return sum("single" in call.hook.stats.name for call in calls)

    return model, lambda: run(inputs, model), single


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("parts", [(0,), (1,), (0, 1)])
def test_a_lora_on_projections_that_mlp_and_attention_share(
    name: str, parts: tuple[int, ...]
) -> None:
    model, once, single = fused_model(name)
    handle = restored(model, "mlp")
    count, without = single(handle), once()
    assert count > 0
    targets = "|".join(FUSED[name][part] for part in parts)
    lora = LoraConfig(r=4, init_lora_weights=False, target_modules=rf".*single.*({targets})")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.add_adapter(lora)
    late = 0 if 1 in parts else count
    assert single(handle) == late
    assert (REPLACED in reasons(handle, "mlp")) == (late == 0)
    assert not torch.equal(once(), without)
    handle = restored(model, "mlp")
    early = 0 if name.startswith("Flux2") and 0 in parts else count
    assert single(handle) == early
    assert (NOT_PLAIN in reasons(handle, "mlp")) == (early == 0)
    model.delete_adapters("default")
    model.unload_lora()
    handle = restored(model, "mlp")
    torch.testing.assert_close(once(), without)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("how", ["forward", "hook"])
def test_other_tools_around_a_shared_projection_out(name: str, how: str) -> None:
    """Other tools would read zeros for tokens that are not chosen, so the MLP is not restored."""
    model, once, single = fused_model(name)
    handle = restored(model, "mlp")
    assert single(handle) > 0
    for path, module in model.named_modules():
        if "single" not in path or not path.endswith(FUSED[name][1].rpartition(".")[2]):
            continue
        if how == "hook":
            module.register_forward_hook(lambda _, args, y: y + 0.1 * args[0][..., : y.shape[-1]])
        else:
            vars(module)["forward"] = lambda x, m=module: F.linear(x, m.weight, m.bias)
    assert single(handle) == 0
    assert REPLACED in reasons(handle, "mlp")
    changed = once()
    handle.active = False
    others = {one.name for one in handle.report().layers if one.kind == "mlp" and one.merged}
    assert not any("single" in other for other in others)
    assert changed.isfinite().all()


def by_token(x: Tensor) -> Tensor:
    return x * torch.linspace(0.5, 2, x.shape[1])[:, None]


def around_forward(module: nn.Module) -> None:
    forward = module.forward
    vars(module)["forward"] = lambda *args: by_token(forward(*args))


def around_block(block: Any) -> None:
    """Put an own forward on a block, as tools do that weigh the MLP by token."""
    mlp = torch.nn.Sequential(block.proj_mlp, block.act_mlp)

    def forward(self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, **kw: Any) -> Any:
        joint = torch.cat([encoder_hidden_states, hidden_states], 1)
        normed, gate = self.norm(joint, emb=kw["temb"])
        attended = self.attn(hidden_states=normed, image_rotary_emb=kw["image_rotary_emb"])
        both = torch.cat([attended, by_token(mlp(normed))], 2)
        joint = joint + gate.unsqueeze(1) * self.proj_out(both)
        return joint.split([encoder_hidden_states.shape[1], hidden_states.shape[1]], 1)

    block.forward = MethodType(forward, block)


TOOLS: dict[str, Callable[[Any], Any]] = {
    "none": lambda block: None,
    "block": around_block,
    "forward of act_mlp": lambda block: around_forward(block.act_mlp),
    "forward of proj_mlp": lambda block: around_forward(block.proj_mlp),
    "hook": lambda block: block.act_mlp.register_forward_hook(lambda _, args, y: by_token(y)),
    "hook before": lambda block: block.act_mlp.register_forward_pre_hook(
        lambda _, args: (by_token(args[0]),)
    ),
    "offloaded": lambda block: cpu_offload(block, torch.device("cpu")),
}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_tools_around_the_activation_get_the_columns_of_each_token(
    kind: str, tool: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a tool no columns of the MLP move through a block."""
    model, once, _ = fused_model("FluxTransformer2DModel")
    block, passed, activation = (
        model.get_submodule("single_transformer_blocks.0"),
        [],
        fused_mlp._activation,
    )

    def counted(*args: Any) -> Any:
        passed.extend(filter(None, [activation(*args)]))
        return activation(*args)

    monkeypatch.setattr(fused_mlp, "_activation", counted)
    if when == "before":
        TOOLS[tool](block)
    handle = restored(model, kind)
    if when == "after":
        TOOLS[tool](block)
    blocks = len(model.get_submodule("single_transformer_blocks"))
    found, count = once(), len(passed)
    monkeypatch.setattr(fused_mlp, "_activation", lambda *_: None)
    torch.testing.assert_close(found, once())
    around = tool != "none" and not (tool == "forward of proj_mlp" and when == "before")
    if tool == "block" and when == "after":  # it replaced our hook
        assert "single_transformer_blocks.0" in str(handle.report())
    else:
        assert count == blocks - around


def test_tokens_of_another_batch_are_all_computed() -> None:
    x = normal(2, 64, 4)
    cells, count = cells_and_count((8, 8), 0.25, 0, x.device)
    rows = Rows(choose_tokens(x, cells, count), Tokens((8, 8)))
    part = rows.take(x)
    assert part is not None
    assert part.shape == (2, 16, 4)
    assert rows.take(x[:1]) is None


def test_backward_hooks_on_shared_projections_are_called() -> None:
    model, inputs = tiny_model("FluxTransformer2DModel")
    blocks: Any = model.get_submodule("single_transformer_blocks")
    seen: list[Tensor] = []
    for block in blocks:
        block.proj_mlp.register_full_backward_hook(lambda _, given, of: seen.append(of[0]))
    restored(model, "mlp")
    model(**inputs, return_dict=False)[0].sum().backward()
    assert len(seen) == len(blocks)
    assert all(grad.any() for grad in seen)


def test_halves_are_the_same_with_gradients_and_estimates() -> None:
    model, inputs = tiny_model("FluxTransformer2DModel")
    handle = restored(model.bfloat16(), "mlp")
    given = {
        name: value.bfloat16() if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    found = run(given, model)
    assert torch.equal(found, model(**given, return_dict=False)[0])
    with handle.estimating_errors():
        assert torch.equal(found, run(given, model))


@pytest.mark.parametrize("name", FUSED)
def test_rules_for_shared_projections(name: str) -> None:
    model, _, single = fused_model(name)
    into = f"single_transformer_blocks.*.{FUSED[name][0]}"
    everywhere = single(restored(model, "mlp"))
    handle = restored(model, "mlp", mlp_keep=1, layers={into: {"mlp_keep": 0.25}})
    assert single(handle) == everywhere > 0
    handle = restored(model, "mlp", layers={into: {"mlp_keep": 1}})
    assert single(handle) == 0
    assert not any(
        one.merged for one in handle.report().layers if one.kind == "mlp" and "single" in one.name
    )


@pytest.mark.parametrize("name", FUSED)
def test_a_cache_of_a_shared_projection(name: str) -> None:
    model, _, single = fused_model(name)
    handle = restored(model, "mlp")
    model.enable_cache(TaylorSeerCacheConfig(cache_identifiers=[f".*single.*{FUSED[name][0]}"]))
    with model.cache_context("run"):
        assert single(handle) == 0
    assert CACHED in reasons(handle, "mlp")


@pytest.mark.parametrize("name", FUSED)
def test_shared_projections_that_are_quantised(name: str) -> None:
    model, _, single = fused_model(name)
    quantize(model, weights=qint8)
    freeze(model)
    count = single(restored(model, "mlp"))
    assert (count == 0) == name.startswith("Flux2")


@pytest.mark.parametrize("first", ["offloaded", "restored"])
@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_linears(kind: str, first: str) -> None:
    unet = one_level_unet()
    want = run_unet(unet)
    handle = restored(unet, kind) if first == "restored" else None
    cpu_offload(unet, torch.device("cpu"))
    handle = handle or restored(unet, kind)
    assert len(checked(handle, lambda: run_unet(unet))) == 2
    remove_mame(unet)
    assert torch.equal(run_unet(unet), want)
    remove_hook_from_module(unet, recurse=True)
    assert torch.equal(run_unet(unet), want)


def test_a_shared_projection_is_restored_where_offloading_was_set_up_first() -> None:
    """Flux 2's projection of queries, keys, values and MLP is split by its weights."""
    model, inputs = tiny_model("Flux2Transformer2DModel")
    cpu_offload(model, torch.device("cpu"))
    want = run(inputs, model)
    handle = restored(model, "mlp")
    assert checked(handle, lambda: run(inputs, model))
    assert reasons(handle, "mlp") == {""}
    remove_mame(model)
    assert torch.equal(run(inputs, model), want)


@pytest.mark.filterwarnings("ignore:.*no layer merges")
def test_a_chunked_feed_forward_is_left_alone() -> None:
    unet = one_level_unet()
    for module in unet.modules():
        if hasattr(module, "set_chunk_feed_forward"):
            module.set_chunk_feed_forward(64, dim=1)
    want = run_unet(unet)
    handle = restored(unet, "mlp")
    assert not checked(handle, lambda: run_unet(unet))
    assert reasons(handle, "mlp") == {MLPHook.OTHER}
    assert torch.equal(run_unet(unet), want)
    assert len(checked(restored(unet, "block"), lambda: run_unet(unet))) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_give_the_same_gradients(kind: str) -> None:
    found = []
    for checkpoints in (False, True):
        unet = one_level_unet().train()
        restored(unet, kind, redraw=False)
        if checkpoints:
            unet.enable_gradient_checkpointing()
        unet(**unet_inputs(unet)).sample.square().mean().backward()
        found.append([p.grad for p in unet.parameters()])
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:.*no layer merges")
def test_a_block_with_a_timestep_for_each_token_is_left_alone() -> None:
    """Wan 2.2 TI2V: the first frame's timestep is 0. An MLP's input is modulated already."""
    model, inputs = tiny_model("WanTransformer3DModel")
    count = 3 * 8 * 12
    inputs["timestep"] = inputs["timestep"][:, None].repeat(1, count)
    inputs["timestep"][:, : count // 3] = 0
    assert len(checked(restored(model, "mlp"), lambda: run(inputs, model))) == 2
    handle = restored(model, "block")
    assert not checked(handle, lambda: run(inputs, model))
    assert reasons(handle, "block") == {BY_TOKEN}


# -------------------------------------------------------------------- caches


@pytest.mark.filterwarnings("ignore:.*no layer merges")
@pytest.mark.parametrize("cache", [PYRAMID, faster(distilled=True)], ids=lambda cache: cache.name)
@pytest.mark.parametrize("first", ["cache", "restoring"])
def test_a_block_with_cached_attention_is_left_alone(cache: Any, first: str) -> None:
    model, inputs = tiny_model("SD3Transformer2DModel")
    inputs["timestep"] = torch.full((2,), 900.0)  # at which these caches compute
    handle = restored(model, "block") if first == "restoring" else None
    cache.enable(model)
    handle = handle or restored(model, "block")
    with one_run(model):
        run(inputs, model)
    assert reasons(handle, "block") == {CACHED}
    cache.disable(model)
    assert len(checked(handle, lambda: run(inputs, model))) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_around_blocks_keeps_restored_outputs(kind: str) -> None:
    model, inputs = tiny_model("FluxTransformer2DModel")
    model.enable_cache(FirstBlockCacheConfig(threshold=1e9))
    handle = restored(model, kind)
    counts = []
    with model.cache_context("run"):
        for _ in range(2):
            run(inputs, model)
            counts.append(sum(one.merged for one in handle.report().layers if one.kind == kind))
            handle.reset()
    assert counts == [4, 1]


# ---------------------------------------------------- blocks of several parts


@pytest.mark.filterwarnings("ignore:.*no layer merges")
def test_blocks_with_a_gated_self_attention_are_left_alone_while_it_is_on() -> None:
    unet = one_level_unet(attention_type="gated", cross_attention_dim=16)
    handle = restored(unet, "block")

    def blocks() -> set[str]:
        calls = checked(handle, lambda: unet(**gligen_inputs(unet)))
        return {call.hook.stats.name.rpartition(".")[2] for call in calls}

    assert blocks() == set()
    assert reasons(handle, "block") == {GATED}
    for module in unet.modules():
        if hasattr(module, "fuser"):
            module.fuser.enabled = False
    assert blocks() == {"0", "1"}


def test_double_self_attention_is_left_alone() -> None:
    model = seeded(
        Transformer2DModel, 0, num_attention_heads=2, attention_head_dim=8, in_channels=8,
        norm_num_groups=4, double_self_attention=True,
    )  # fmt: skip
    x = normal(2, 8, 8, 8)
    with pytest.raises(ValueError, match=f"^block_keep: .*: {SEVERAL}"):
        restored(model, "block")
    assert len(checked(restored(model, "mlp"), lambda: model(x))) == 1


@pytest.mark.filterwarnings("ignore:.*no layer merges")
def test_a_cross_attention_without_a_text_is_a_second_self_attention() -> None:
    unet = one_level_unet(cross_attention_dim=16)
    inputs = {**unet_inputs(unet), "encoder_hidden_states": None}
    with torch.no_grad():
        want = unet(**inputs).sample
        handle = restored(unet, "block")
        assert torch.equal(unet(**inputs).sample, want)
    assert reasons(handle, "block") == {SEVERAL}


@pytest.mark.parametrize("kind", KINDS)
def test_an_ip_adapter_with_masks(kind: str) -> None:
    pipe = tiny_pipeline()
    load_ip_adapter(pipe)
    image = normal(2, 1, 16, seed=1)
    masks = torch.zeros(1, 1, 32, 32)
    masks[..., :16] = 1
    handle = restored(pipe, kind)

    def forward() -> Tensor:
        return once(
            pipe,
            ip_adapter_image_embeds=[image],
            cross_attention_kwargs={"ip_adapter_masks": [masks]},
        )

    assert len(checked(handle, forward)) == 7


# ----------------------------------------------------- graphs


@pytest.mark.compiles
@pytest.mark.parametrize(("kind", "blocks", "count"), [("mlp", 1, 1), ("block", 3, 2)])
def test_repeated_blocks_compile_once(
    kind: str, blocks: int, count: int, graphs: Counter[str]
) -> None:
    """Blocks compile as often as without hooks: the first block's input has other strides."""
    unet = one_level_unet(transformer_layers_per_block=blocks)
    handle = restored(unet, kind)
    want = run_unet(unet)
    unet.compile_repeated_blocks(fullgraph=True, backend="eager")
    torch.testing.assert_close(run_unet(unet), want)
    assert graphs["unique_graphs"] == count
    assert reasons(handle, kind) == {""}


@pytest.mark.compiles
@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("name", FUSED)
def test_blocks_that_fuse_mlp_and_attention_compile_to_one_graph(name: str) -> None:
    model, once, _ = fused_model(name)
    restored(model, "mlp")
    want = once()
    for block in model.get_submodule("single_transformer_blocks").children():
        block.compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(once(), want)
