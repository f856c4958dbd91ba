"""The MLP on merged tokens: right numbers, only where asked, and off without a trace."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, DiTTransformer2DModel, FluxTransformer2DModel

from benchmarks.free import free_on, work
from mame_sd import MaMeAttnProcessor, MaMeConfig, NothingMergedError, apply_mame, mame, remove_mame
from mame_sd.cli import app as cli
from mame_sd.config import Study
from mame_sd.core.reference import reference_plan
from mame_sd.diffusion.apply_denoiser import has_hooks
from mame_sd.pipelines import StableDiffusionMaMePipeline
from tests.builders.layers import attention, motion_unet
from tests.builders.settings import nested
from tests.builders.tiny import (
    generate,
    run_unet,
    seeded,
    tiny_components,
    tiny_pipeline,
    tiny_sdxl_unet,
    tiny_unet,
)
from tests.builders.tokens import detail_of
from tests.builders.transformers import FLUX

ON: dict[str, Any] = {"mlp": 0.5, "min_tokens": 24}
SIZE = (4, 6)  # of the attention's tokens at a latent of 8 x 12 in `tiny_sdxl_unet`
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "tau": {"tau": 0.3},
    "plain": {"preset": "plain"},
    "averaged": {"weights": "average", "tiles": 4, "stride": (3, 2)},
    "keys": {"feature": "k"},
    "all": {"mlp": 1.0},
}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hooked(**fields: Any) -> tuple[Any, Any, Any]:
    """A merged SDXL-like UNet in float64 after one forward, one of its blocks, and that block as it
    was before.
    """
    unet = tiny_sdxl_unet().double()
    block = unet.mid_block.attentions[0].transformer_blocks[1]
    plain = copy.deepcopy(block)
    apply_mame(unet, **nested({**ON, **fields}))
    forward(unet)
    return unet, block, plain


def forward(unet: Any) -> torch.Tensor:
    dtype = unet.dtype
    added = {"text_embeds": normal(2, 16).to(dtype), "time_ids": torch.ones(2, 6)}
    text = normal(2, 7, 16).to(dtype)
    return unet(
        normal(2, 4, 8, 12).to(dtype), torch.tensor(500), text, added_cond_kwargs=added
    ).sample


@pytest.mark.parametrize("fields", FORMS.values(), ids=FORMS.keys())
def test_outputs_and_gradients_are_the_references(fields: dict[str, Any]) -> None:
    _, block, plain = hooked(**fields)
    config = MaMeConfig(**nested({**ON, **fields}))
    x = normal(2, 24, 32, seed=2).requires_grad_()
    own = config.of_part("mlp")
    assert own is not None
    plan = reference_plan(x, own, SIZE)
    merged = plan.merge(x)
    assert merged.shape[1] == max(len(plan.dst), round(24 * config.mlp))
    results = [
        block.ff(x),
        plan.restore(plain.ff(merged), detail_of(x, own, SIZE)),
    ]
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)
    down = normal(2, 24, 32, seed=3)
    torch.testing.assert_close(
        *(torch.autograd.grad(y, x, down)[0] for y in results), rtol=1e-7, atol=1e-9
    )


def test_parts_have_destinations_of_their_own_at_each_step() -> None:
    unet = tiny_sdxl_unet()
    handle = apply_mame(unet, keep=1.0, min_tokens=24, mlp=0.5)
    with torch.no_grad():
        drawn = forward(unet)
        handle.set(study=Study(redraw=False))
        assert not torch.equal(forward(unet), drawn)


def test_off_is_bit_equal_and_leaves_no_hook() -> None:
    unet = tiny_sdxl_unet()
    before = run_unet(unet)
    handle = apply_mame(unet, min_tokens=40)
    attention_only = run_unet(unet)
    block = unet.mid_block.attentions[0].transformer_blocks[0]
    assert not has_hooks(block.ff)
    handle.set(mlp=0.5)
    assert has_hooks(block.ff)
    mlp = run_unet(unet)
    assert len({output.sum().item() for output in (before, attention_only, mlp)}) == 3
    handle.set(mlp=None)
    assert torch.equal(run_unet(unet), attention_only)
    with mame(unet, mlp=0.5, min_tokens=40) as inner:
        assert torch.equal(run_unet(unet), mlp)
        inner.active = False
        assert torch.equal(run_unet(unet), before)
    assert handle.installed
    assert not has_hooks(block.ff)
    assert torch.equal(run_unet(unet), attention_only)
    handle.set(mlp=0.5)
    remove_mame(unet)
    assert not has_hooks(unet)
    assert torch.equal(run_unet(unet), before)
    handle.install()
    assert torch.equal(run_unet(unet), mlp)


def test_the_report_counts_parts_only_while_they_are_on() -> None:
    unet = tiny_unet()
    handle = apply_mame(unet, min_tokens=24, keep=0.25, mlp=0.5)
    handle.capture()
    run_unet(unet, height=8, width=12)
    report = handle.report()
    assert {layer.part for layer in report.layers} == {"attention", "mlp"}
    assert all(layer.name.endswith("ff") == (layer.part == "mlp") for layer in report.layers)
    assert {
        (layer.tokens_in, layer.tokens_kept, layer.size)
        for layer in report.layers
        if layer.part == "mlp"
    } == {
        (96, 48, (8, 12)),
        (24, 12, (4, 6)),
    }
    assert [level.tokens_kept for level in report.levels("mlp")] == [48, 12]
    assert [level.layers for level in report.levels()] == [3, 4]
    assert "level 0, mlp: 96 -> 48 tokens (50%), 3 of 3 layers merge" in str(report)
    assert sum(name.endswith("ff") for name in handle.plans()) == 7
    handle.set(mlp=None)
    assert {layer.part for layer in handle.report().layers} == {"attention"}
    assert not any(name.endswith("ff") for name in handle.plans())
    handle.set(mlp=0.5, min_tokens=200)
    handle.reset()
    run_unet(unet, height=8, width=12)
    with pytest.raises(NothingMergedError, match="fewer than min_tokens=200"):
        handle.report()


@pytest.mark.parametrize("dim", [0, 1])
def test_chunked_feed_forward(dim: int) -> None:
    unet = tiny_unet()
    expected = run_unet(unet) if dim == 1 else None
    handle = apply_mame(unet, keep=1.0, merge="qkv", min_tokens=40, mlp=0.5)
    if dim == 0:
        expected = run_unet(unet)
    for module in unet.modules():
        if hasattr(module, "set_chunk_feed_forward"):
            module.set_chunk_feed_forward(1 if dim == 0 else 32, dim)
    assert expected is not None
    torch.testing.assert_close(run_unet(unet), expected, rtol=1e-4, atol=1e-5)
    merged = {layer.merged for layer in handle.report().layers if layer.part == "mlp"}
    assert merged == {dim == 0}


def test_frames_and_grounding_are_left_alone() -> None:
    unet = motion_unet()
    handle = apply_mame(unet, tau=0.2, **{**ON, "min_tokens": 1})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        text = torch.randn(6, 7, 16, generator=generator)
        unet(torch.randn(1, 4, 6, 8, 12, generator=generator), torch.tensor(500), text)
    layers = handle.report().layers
    assert {layer.part for layer in layers} == {"attention", "mlp"}
    assert not any("motion" in layer.name for layer in layers)
    assert {layer.size for layer in layers} == {(8, 12), (4, 6)}
    gated = apply_mame(tiny_unet(attention_type="gated", cross_attention_dim=16), mlp=0.5)
    assert not any("fuser" in layer.name for layer in gated.report().layers if layer.part == "mlp")


def test_a_controlnet_has_its_own() -> None:
    net = seeded(ControlNetModel.from_unet, 0, tiny_unet(), conditioning_channels=3)
    assert {layer.part for layer in apply_mame(net, **ON).report().layers} == {"attention", "mlp"}


def test_patches_of_a_dit() -> None:
    kind: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 1,
    }
    model = seeded(
        DiTTransformer2DModel, 0, sample_size=16, patch_size=2, num_embeds_ada_norm=10, **kind
    )
    handle = apply_mame(model, mlp=0.5, min_tokens=1)
    with torch.no_grad():
        model(
            normal(2, 4, 16, 16).float(),
            timestep=torch.tensor([5, 5]),
            class_labels=torch.tensor([1, 2]),
        )
    (found,) = (layer for layer in handle.report().layers if layer.part == "mlp")
    assert (found.tokens_in, found.tokens_kept, found.size) == (64, 32, (8, 8))


def flux() -> Any:
    return seeded(FluxTransformer2DModel, 0, **FLUX, pooled_projection_dim=8)


def test_what_can_not_be_had_is_refused_in_one_line() -> None:
    name = "mlp"
    with pytest.raises(ValueError, match=f"^{name}: expected none, got 0.5: .*use apply_mame$"):
        MaMeAttnProcessor(**nested({name: 0.5}))
    for build, kind in ((flux, "FluxTransformer2DModel"), (attention, "Attention")):
        model = build()
        with pytest.raises(
            ValueError, match=f"^{name}: expected blocks .* found none in {kind}; leave {name} out$"
        ):
            apply_mame(model, **nested({name: 0.5}))
        assert not has_hooks(model)
        handle = apply_mame(model)
        with pytest.raises(ValueError, match=f"^{name}: expected blocks"):
            handle.set(**nested({name: 0.5}))
        assert handle.config == MaMeConfig()


def test_checkpointing_copies_and_adapters() -> None:
    peft = pytest.importorskip("peft")
    unet, _, _ = hooked()
    unet = unet.float().train()
    twin = copy.deepcopy(unet)
    gradients = []
    for model in (unet, twin):
        if model is twin:
            model.enable_gradient_checkpointing()
        forward(model).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(g is not None for g in gradients[0])
    torch.testing.assert_close(gradients[1], gradients[0])
    before = run_unet(unet.eval(), height=8, width=12)
    unet.add_adapter(peft.LoraConfig(r=2, target_modules=["net.0.proj", "net.2"]))
    assert torch.equal(run_unet(unet, height=8, width=12), before)
    with torch.no_grad():
        for name, parameter in unet.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    assert not torch.equal(run_unet(unet, height=8, width=12), before)
    assert torch.equal(run_unet(twin.eval(), height=8, width=12), before)


def test_one_graph_and_no_recompilation() -> None:
    torch._dynamo.reset()
    _, block, _ = hooked()
    calls = [(normal(2, 24, 32, seed=s), None, normal(2, 7, 16, seed=s)) for s in range(3)]
    with torch.no_grad():
        expected = [block(*call) for call in calls]
        compiled = torch.compile(block, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*calls[0]), expected[0])
        with torch.compiler.set_stance("fail_on_recompile"):
            for call, y in zip(calls[1:], expected[1:], strict=True):
                torch.testing.assert_close(compiled(*call), y)


def test_a_saved_pipeline_brings_its_setting_back(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"mlp": 0.5, "min_tokens": 40}
    pipe = StableDiffusionMaMePipeline(
        **tiny_components(), mame_config=MaMeConfig(keep=0.4, **nested(fields))
    )
    pipe.save_pretrained(tmp_path / "model")
    again = StableDiffusionMaMePipeline.from_pretrained(tmp_path / "model")
    again.set_progress_bar_config(disable=True)
    assert again.mame_config == MaMeConfig(keep=0.4, **nested(fields))
    image = generate(again)
    assert {layer.part for layer in again.mame.report().layers} == {"attention", "mlp"}
    assert torch.equal(generate(again, keep=None), generate(tiny_pipeline()))
    again.set_mame(mame_config={"min_tokens": 40})
    assert not torch.equal(generate(again), image)
    assert {layer.part for layer in again.mame.report().layers} == {"attention"}
    out = tmp_path / "run"
    options = [
        "--model",
        str(tmp_path / "model"),
        "--device",
        "cpu",
        "--steps",
        "1",
        "--mlp",
        "0.75",
    ]
    assert cli.run(["generate", "--prompt", "key", "--out", str(out), *options]) == 0
    used = json.loads((out / "manifest.json").read_text())["settings"]["mame"]
    assert MaMeConfig.from_dict(used) == MaMeConfig(keep=0.4, **nested({**fields, "mlp": 0.75}))


def test_the_free_bound_computes_the_kept_tokens_and_goes_again() -> None:
    unet, counted = tiny_unet(), []
    before = run_unet(unet)
    block = unet.mid_block.attentions[0].transformer_blocks[0]
    block.ff.net[0].register_forward_pre_hook(lambda module, args: counted.append(args[0].shape[1]))
    with free_on(unet, MaMeConfig(mlp=0.5, min_tokens=40)):
        assert not torch.equal(run_unet(unet), before)
    assert torch.equal(run_unet(unet), before)
    assert counted == [32, 64]


def test_the_work_of_the_free_bound() -> None:
    settings = {
        "all": (1.0, None),
        "keys": (0.25, None),
        "mlp .75": (0.25, 0.75),
        "mlp .5": (0.25, 0.5),
    }
    configs = {
        name: MaMeConfig(min_tokens=40, keep=keep, mlp=mlp)
        for name, (keep, mlp) in settings.items()
    }
    share = work(tiny_unet(), 128, 1, configs)
    assert share["all"] == 1
    assert 1 > share["keys"] > share["mlp .75"] > 0
    assert share["keys"] - share["mlp .5"] == pytest.approx(2 * (share["keys"] - share["mlp .75"]))
