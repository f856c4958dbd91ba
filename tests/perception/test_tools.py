"""Test merging before and after other tools: replaced layers, export, offloading, compilation."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from optimum.quanto import freeze, qint8, quantize
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic
from torch.utils.flop_counter import FlopCounterMode

from mame_sd.core import groups
from mame_sd.perception.apply_encoder import (
    apply_encoder,
    has_encoder_hooks,
    remove_encoder,
)
from tests.builders.perception import SHALLOW, SIDE, TIMM_MODELS, VIT
from tests.builders.timm_models import NEEDS_TIMM
from tests.builders.tiny import seeded
from tests.perception.oracle import blocks_of


def lora(model: nn.Module, merged: bool = False, more: tuple[str, ...] = ()) -> nn.Module:
    torch.manual_seed(1)
    layers = ["k_proj", "q_proj", "qkv", "key", "query", *more]
    config = LoraConfig(target_modules=layers, r=3, init_lora_weights=False)
    adapted: Any = get_peft_model(model, config)
    return (adapted.merge_and_unload() if merged else adapted).eval()


def dynamic(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def dynamic_and_saved(model: nn.Module) -> nn.Module:
    """Replace a layer by one that can't be saved, which merging must not keep."""
    return pickle.loads(pickle.dumps(dynamic(model)))


def quanto(model: nn.Module) -> nn.Module:
    quantize(model, weights=qint8)
    freeze(model)
    return model


def offloading(model: nn.Module) -> nn.Module:
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    return model


def compiled(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


TOOLS: dict[str, Callable[[Any], Any]] = {
    "LoRA": lora,
    "LoRA, merged": lambda model: lora(model, merged=True),
    "dynamic int8": dynamic,
    "dynamic int8, saved": dynamic_and_saved,
    "quanto": quanto,
    "offload": offloading,
    "compile": compiled,
    "weights of 16 bits": lambda model: model.bfloat16(),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
@torch.no_grad()
def test_tools_go_before_merging_or_after_it(tool: Callable[[Any], Any]) -> None:
    dtype = tool(SHALLOW.build()).dtype if tool is TOOLS["weights of 16 bits"] else torch.float32
    inputs = {name: value.to(dtype) for name, value in VIT.batch().items()}
    plain = (SHALLOW.build() if tool is compiled else tool(SHALLOW.build()))(**inputs).logits
    first = tool(SHALLOW.build())
    if tool is compiled:
        first(**inputs)  # compiled without merging
    counted = apply_encoder(first, blocks=1)
    want = first(**inputs).logits
    second = SHALLOW.build()
    apply_encoder(second, blocks=1)
    second = tool(second)
    assert torch.equal(second(**inputs).logits, want)
    assert not torch.allclose(want, plain, rtol=1e-3, atol=1e-3)
    report = counted.report()
    assert report.calls == 1
    assert 0.5 < report.share < 0.9
    assert not report.layers[0].note, "the first block has its grid"
    for model in (first, second):
        remove_encoder(model)
        assert not has_encoder_hooks(model)
        assert torch.equal(model(**inputs).logits, plain)
        if tool is offloading:
            assert all("forward" in part.__dict__ for part in model.modules()), "its hooks stay"
            remove_hook_from_module(model, recurse=True)
            apply_encoder(model, blocks=1)
            assert torch.equal(model(**inputs).logits, want)


class _First(nn.Module):
    """The first tensor of a model's output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        output: Tensor = self.model(pixel_values)[0]
        return output


@pytest.mark.compiles
@torch.no_grad()
def test_an_exported_graph_merges_and_takes_any_batch() -> None:
    model = _First(SHALLOW.build().requires_grad_(False))
    x = SHALLOW.batch()["pixel_values"]
    plain = model(x)
    apply_encoder(model, keep=0.6, blocks=1)
    any_batch = {"pixel_values": {0: torch.export.Dim.DYNAMIC}}
    graph = torch.export.export(model, (x,), dynamic_shapes=any_batch).module()
    more = torch.cat([x, -x, x / 2])
    torch.testing.assert_close(graph(more), model(more))
    assert not torch.allclose(graph(x), plain)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_tracing_and_replicas_of_data_parallel_are_refused() -> None:
    vit, x = VIT.build(), VIT.batch()["pixel_values"]
    model = _First(vit)
    apply_encoder(model)
    with pytest.raises(RuntimeError, match=r"expected torch.export of a merged model, got torch"):
        torch.jit.trace(model, x, check_trace=False)
    assert model(x).isfinite().all(), "nothing is left of it"
    replica = vit.vit._replicate_for_data_parallel()
    replica._modules = dict(vit.vit._modules)
    with pytest.raises(RuntimeError, match=r"got a replica of torch\.nn\.DataParallel"):
        replica(x)


@pytest.mark.parametrize("fields", [{"tau": 0.4}, {"restore": True}], ids=str)
@torch.no_grad()
def test_threads_compute_as_alone(fields: dict[str, Any]) -> None:
    model = VIT.build()
    handle = apply_encoder(model, **fields)
    handle.capture()
    sides = [SIDE, SIDE + 8, SIDE + 16, SIDE + 24]
    images = [torch.randn(2, 3, side, SIDE) for side in sides]

    def answer(number: int) -> tuple[Tensor, Tensor]:
        logits = model(images[number], interpolate_pos_encoding=True).logits
        return logits, handle.plans()[3].kept

    want = [answer(number) for number in range(4)]
    got: list[Any] = [None] * 4
    handle.reset()

    def run(number: int) -> None:
        for _ in range(6):
            got[number] = answer(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(got, want, strict=True):
        assert all(map(torch.equal, one, other))
    assert handle.report().calls == 24


@torch.no_grad()
def test_a_change_while_another_thread_is_in_a_forward_is_refused() -> None:
    model = VIT.build()
    handle = apply_encoder(model)
    inside, go = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        go.wait(60)

    hook = blocks_of(model, VIT)[1].register_forward_pre_hook(wait)
    other = threading.Thread(target=lambda: VIT.call(model, VIT.batch()))
    other.start()
    inside.wait(60)
    try:
        for change in (
            lambda: apply_encoder(model),
            lambda: remove_encoder(model),
            lambda: handle.set(keep=0.5),
            lambda: setattr(handle, "active", False),
            handle.remove,
        ):
            with pytest.raises(RuntimeError, match="expected no other thread in a forward of ViT"):
                change()
        assert handle.installed
    finally:
        go.set()
        other.join()
        hook.remove()
    with pytest.raises(ValueError, match=r"size|match"):  # a forward that raises has ended too
        model(torch.randn(1, 3, SIDE + 4, SIDE))
    remove_encoder(model)


def timm_vit(**fields: Any) -> Any:
    kind = TIMM_MODELS.VisionTransformer
    sizes = {"img_size": SIDE, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 2}
    return seeded(kind, 0, **{**sizes, **fields}).requires_grad_(False)


def backbone(norm: bool) -> Any:
    getter = __import__("timm.models._features", fromlist=["x"]).FeatureGetterNet
    return getter(timm_vit(reg_tokens=2), out_indices=[1, 3], norm=norm, prune=False)


IMAGE = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
MAPS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], bool]] = {
    "backbone, normed": (lambda: backbone(True), lambda model: model(IMAGE), True),
    "intermediates": (
        lambda: timm_vit(class_token=False, global_pool="avg"),
        lambda model: model.forward_intermediates(IMAGE, [1, 3], intermediates_only=True),
        False,
    ),
}


@NEEDS_TIMM
@pytest.mark.parametrize(("build", "maps", "norm"), MAPS.values(), ids=MAPS)
@torch.no_grad()
def test_timm_s_feature_maps_have_every_token_at_its_place(
    build: Callable[[], Any], maps: Callable[[Any], Any], norm: bool
) -> None:
    model = build()
    plain = maps(model)
    vit = getattr(model, "model", model)
    handle = apply_encoder(model, keep=0.7, blocks=(0, 2), restore=False)
    handle.capture()
    got = maps(model)
    assert [one.shape for one in got] == [one.shape for one in plain]
    states: list[Tensor] = []
    hooks = [
        vit.blocks[number].register_forward_hook(lambda *args: states.append(args[2]))
        for number in (1, 3)
    ]
    vit(IMAGE)  # tokens as blocks leave them, restored by hand
    for hook in hooks:
        hook.remove()
    for map_, block, whole in zip(got, (1, 3), states, strict=True):
        for number in sorted(handle.plans(), reverse=True):
            whole = handle.plans()[number].restore(whole) if number <= block else whole
        whole = vit.norm(whole) if norm else whole
        torch.testing.assert_close(map_.flatten(2).mT, whole[:, handle.num_prefix_tokens :])
    assert handle.report().layers[-1].tokens_kept <= 20
    remove_encoder(model)
    assert all(map(torch.equal, maps(model), plain))


def new_convolution(model: Any) -> Any:
    old, model.patch_embed.proj = model.patch_embed.proj, nn.Conv2d(3, 32, 4, 4)
    model.patch_embed.proj.load_state_dict(old.state_dict())
    return model


@NEEDS_TIMM
@pytest.mark.parametrize(
    ("tool", "features"),
    [
        (lora, lambda model: model.forward_features(IMAGE)),
        (new_convolution, lambda model: model.forward_features(IMAGE)),
        (lora, lambda model: model.get_intermediate_layers(IMAGE, n=[3])[0]),
        (new_convolution, lambda model: model.forward_intermediates(IMAGE, [3])[1][0]),
    ],
    ids=["LoRA", "convolution", "layers", "intermediates"],
)
@torch.no_grad()
def test_tools_go_before_merging_or_after_it_when_parts_of_the_model_are_called(
    tool: Callable[[Any], Any], features: Callable[[Any], Tensor]
) -> None:
    plain = features(tool(timm_vit()))
    first, second = tool(timm_vit()), timm_vit()
    handles = [apply_encoder(model) for model in (first, second)]
    second = tool(second)
    want = features(first)
    assert torch.equal(features(second), want)
    assert want.shape != plain.shape or not torch.allclose(want, plain, rtol=1e-3, atol=1e-3)
    for handle in handles:
        handle.remove()
    for model in (first, second):
        assert not has_encoder_hooks(model)
        assert torch.equal(features(model), plain)


@NEEDS_TIMM
@torch.no_grad()
def test_a_part_that_was_replaced_whole_is_refused_until_the_model_is_called() -> None:
    model, other = timm_vit(), timm_vit()
    apply_encoder(model)
    want = model.forward_features(IMAGE)
    model.patch_embed = other.patch_embed
    with pytest.raises(RuntimeError, match=r"expected patch_embed\.proj as merging was applied"):
        model.forward_features(IMAGE)
    model(IMAGE)
    assert torch.equal(model.forward_features(IMAGE), want)
    model.patch_embed = nn.Sequential(other.patch_embed)
    with pytest.raises(RuntimeError, match=r"proj as merging .* got none; call apply_mame again"):
        model(IMAGE)
    apply_encoder(model)
    assert torch.equal(model.forward_features(IMAGE), want)


@NEEDS_TIMM
@torch.no_grad()
def test_what_changes_tokens_between_blocks_of_a_backbone_is_refused() -> None:
    model = backbone(False)
    apply_encoder(model)
    model.model.blocks[1].register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(RuntimeError, match="expected the tokens that block 1 gave"):
        model(IMAGE)


@NEEDS_TIMM
@torch.no_grad()
def test_adapters_on_the_convolution_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups, "ADDING", ())  # reports count what a card does
    model, image = timm_vit(), IMAGE[:1]
    handle = apply_encoder(model, keep=0.6)
    for active in (True, False, True):
        handle.active = active
        with (
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            model(image)
        report = handle.report()
        assert counter.get_total_flops() / 2 == (report.flops if active else report.flops_before)
        if not active:
            lora(model, more=("proj",))
            handle.reset()


@torch.no_grad()
def test_a_model_that_lists_its_blocks_first_has_a_grid() -> None:
    model = VIT.build()
    embeddings = model.vit._modules.pop("embeddings")
    model.vit.add_module("embeddings", embeddings)
    handle = apply_encoder(model)
    VIT.call(model, VIT.batch())
    assert not handle.report().layers[0].note


def put_anew(model: nn.Module) -> nn.Module:
    """Put another projection to keys into the first block, and return the one that was there."""
    block = blocks_of(model, VIT)[0]
    path = next(name for name, _ in block.named_modules() if name.endswith(("key", "k_proj")))
    outer, _, name = path.rpartition(".")
    old = block.get_submodule(path)
    setattr(block.get_submodule(outer), name, copy.deepcopy(old))
    return old


@pytest.mark.parametrize("how", ["handle", "model", "block"])
def test_a_part_that_was_taken_out_keeps_no_hook(how: str) -> None:
    model = VIT.build()
    with apply_encoder(model, keep=0.5) as handle:
        VIT.call(model, VIT.batch())
        old = put_anew(model)
        if how != "block":
            handle.remove() if how == "handle" else remove_encoder(model)
            assert not has_encoder_hooks(old)
    assert not has_encoder_hooks(old)
    assert not has_encoder_hooks(model)
