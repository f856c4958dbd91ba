"""apply_mame on real models: bit-equal to the one-liner and, after removal, to before; live settings; bookkeeping."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import (
    DiTTransformer2DModel,
    I2VGenXLUNet,
    MotionAdapter,
    PixArtTransformer2DModel,
    UNet3DConditionModel,
    UNetMotionModel,
    UNetSpatioTemporalConditionModel,
)
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention_processor import Attention, AttnProcessor2_0, FusedAttnProcessor2_0

from mame_sd import MaMeAttnProcessor, MaMeConfig, NothingMergedError, apply_mame, mame, remove_mame
from mame_sd.hooks import has_hooks
from tests.test_processor import CONFIGS, added_kv_unet, attention, every_config, tokens
from tests.tiny import (
    generate,
    run_unet,
    seeded,
    tiny_pipeline,
    tiny_sdxl_unet,
    tiny_text_encoder,
    tiny_tokenizer,
    tiny_unet,
    tiny_vae,
    unet_inputs,
)

SIZES = [(16, 16), (8, 24), (12, 20)]
MERGING = {"tau": 0.2, "min_tokens": 40}


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("build", [tiny_unet, tiny_sdxl_unet], ids=["sd", "sdxl"])
@every_config
def test_bit_equal_to_the_processor_and_after_removal(
    fields: dict[str, Any], build: Any, size: tuple[int, int]
) -> None:
    unet = build()
    shape = {"height": size[0], "width": size[1]}
    before = run_unet(unet, **shape)
    apply_mame(unet, min_tokens=40, **fields)
    hooked = run_unet(unet, **shape)
    assert not torch.equal(hooked, before)
    remove_mame(unet)
    assert torch.equal(run_unet(unet, **shape), before)
    unet.set_attn_processor(MaMeAttnProcessor(min_tokens=40, size=size, **fields))
    assert torch.equal(run_unet(unet, **shape), hooked)


@pytest.mark.parametrize("batch", [1, 2, 3, 4], ids=lambda b: f"B{b}")
def test_each_sample_of_a_batch_is_its_own_with_keep(batch: int) -> None:
    unet = tiny_unet()
    apply_mame(unet, keep=0.4, min_tokens=40)
    whole = run_unet(unet, batch=batch, height=8, width=12)
    assert whole.shape == (batch, 4, 8, 12)
    inputs = torch.randn(batch, 4, 8, 12, generator=torch.Generator().manual_seed(3))
    text = torch.randn(batch, 7, 16, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        together = unet(inputs, torch.tensor(500), text).sample
        alone = [unet(inputs[i : i + 1], torch.tensor(500), text[i : i + 1]).sample for i in range(batch)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "latent", "expected"),
    [
        ({"block_out_channels": (8, 8, 8, 8), "attention_head_dim": 1}, 64, [4096, 1024]),
        ({"block_out_channels": (8, 8, 8, 8), "attention_head_dim": 1}, 96, [9216, 2304]),
        ({"sdxl": True}, 128, [4096, 1024]),
    ],
    ids=["sd1-512", "sd2-768", "sdxl-1024"],
)
def test_default_levels(overrides: dict[str, Any], latent: int, expected: list[int]) -> None:
    cross, up = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"
    config: dict[str, Any] = {"norm_num_groups": 8, **overrides}
    if config.pop("sdxl", False):
        unet = tiny_sdxl_unet(
            block_out_channels=(8, 8, 8),
            down_block_types=("DownBlock2D", cross, cross),
            up_block_types=(up, up, "UpBlock2D"),
            transformer_layers_per_block=(1, 1, 2),
            attention_head_dim=1,
        )
    else:
        unet = tiny_unet(
            down_block_types=(cross, cross, cross, "DownBlock2D"), up_block_types=("UpBlock2D", up, up, up), **config
        )
    handle = apply_mame(unet)
    run_unet(unet, batch=1, height=latent, width=latent)
    levels = handle.report().levels()
    assert [level.tokens_in for level in levels if level.layers_merged == level.layers] == expected
    assert all(level.share == pytest.approx(0.25, abs=0.01) for level in levels if level.layers_merged)
    assert all(level.tokens_in < 1024 for level in levels if not level.layers_merged)


def test_only_self_attention_is_hooked() -> None:
    unet = tiny_unet()
    handle = apply_mame(unet, **MERGING)
    run_unet(unet)
    names = [layer.name for layer in handle.report().layers]
    assert len(names) == 7
    assert all(name.endswith("attn1") for name in names)


def test_report_knows_sizes_levels_and_calls() -> None:
    unet = tiny_unet()
    handle = apply_mame(unet, **MERGING)
    assert {layer.reason for layer in handle.report().layers} == {"not called yet"}
    for _ in range(3):
        run_unet(unet, height=10, width=18)
    report = handle.report()
    assert {(layer.level, layer.tokens_in, layer.size) for layer in report.layers} == {
        (0, 180, (10, 18)),
        (1, 45, (5, 9)),
    }
    assert {layer.calls for layer in report.layers} == {3}
    assert all(layer.tokens_kept < layer.tokens_in for layer in report.layers if layer.level == 0)
    assert "level 0: 180 ->" in str(report)
    assert [level["layers"] for level in report.to_dict()["levels"]] == [3, 4]
    handle.reset()
    assert {layer.calls for layer in handle.report().layers} == {0}


def test_report_raises_when_nothing_could_merge() -> None:
    unet = tiny_unet()
    handle = apply_mame(unet)
    run_unet(unet)
    with pytest.raises(NothingMergedError, match="fewer than min_tokens=1024"):
        handle.report()


@pytest.mark.parametrize("fields", [{"tau": 0.2}, {"keep": 0.4}], ids=["qkv", "kv"])
def test_survives_fused_projections(fields: dict[str, Any]) -> None:
    unet = tiny_unet()
    handle = apply_mame(unet, min_tokens=40, **fields)
    before = run_unet(unet)
    unet.fuse_qkv_projections()
    handle.reset()
    torch.testing.assert_close(run_unet(unet), before, rtol=1e-4, atol=1e-5)
    assert all(layer.merged for layer in handle.report().layers)
    assert all(type(p) is FusedAttnProcessor2_0 for p in unet.attn_processors.values())
    unet.unfuse_qkv_projections()
    assert torch.equal(run_unet(unet), before)


@pytest.mark.parametrize("fields", [{"tau": 0.2}, {"keep": 0.4}], ids=["qkv", "kv"])
def test_survives_slicing_and_default_processors(fields: dict[str, Any]) -> None:
    pipe = tiny_pipeline()
    handle = apply_mame(pipe, min_tokens=40, **fields)
    before = run_unet(pipe.unet)
    pipe.enable_attention_slicing()
    torch.testing.assert_close(run_unet(pipe.unet), before, rtol=1e-4, atol=1e-5)
    pipe.disable_attention_slicing()
    torch.testing.assert_close(run_unet(pipe.unet), before, rtol=1e-4, atol=1e-5)
    pipe.unet.set_attn_processor(AttnProcessor2_0())
    assert torch.equal(run_unet(pipe.unet), before)
    assert all(layer.calls == 4 for layer in handle.report().layers)


def test_survives_freeu_and_ip_adapter_and_leaves_cross_attention_alone() -> None:
    pipe = tiny_pipeline()
    handle = apply_mame(pipe, **MERGING)
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    pipe.unet.set_attn_processor({**pipe.unet.attn_processors})
    run_unet(pipe.unet)
    assert all(layer.merged for layer in handle.report().layers)
    pipe.disable_freeu()
    generator = torch.Generator().manual_seed(0)
    adapter: dict[str, torch.Tensor] = {}
    for i, (name, attn) in enumerate((n, m) for n, m in pipe.unet.named_modules() if n.endswith("attn2")):
        for part in ("to_k_ip", "to_v_ip"):
            adapter[f"{2 * i + 1}.{part}.weight"] = torch.randn(attn.inner_dim, 16, generator=generator)
        assert name
    projection = {
        "proj.weight": torch.randn(4 * 16, 16, generator=generator),
        "proj.bias": torch.zeros(4 * 16),
        "norm.weight": torch.ones(16),
        "norm.bias": torch.zeros(16),
    }
    pipe.unet._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": adapter}])
    handle.reset()
    with torch.no_grad():
        sample = torch.randn(1, 4, 16, 16, generator=generator)
        text = torch.randn(1, 7, 16, generator=generator)
        image = {"image_embeds": [torch.randn(1, 1, 16, generator=generator)]}
        pipe.unet(sample, torch.tensor(500), text, added_cond_kwargs=image)
    assert all(layer.merged and layer.calls == 1 for layer in handle.report().layers)
    assert sum("IPAdapter" in type(p).__name__ for p in pipe.unet.attn_processors.values()) == 7


def test_pag_merges_all_but_the_perturbed_layers_with_kv() -> None:
    from diffusers import StableDiffusionPAGPipeline

    pipe = StableDiffusionPAGPipeline(
        **tiny_pipeline().components, requires_safety_checker=False, pag_applied_layers=["mid"]
    )
    pipe.set_progress_bar_config(disable=True)
    handle = apply_mame(pipe, keep=0.4, min_tokens=40)
    generate(pipe, pag_scale=2.0)
    skipped = [layer for layer in handle.report().layers if not layer.merged]
    assert [layer.name.split(".")[0] for layer in skipped] == ["mid_block"]
    assert "PAG" in skipped[0].reason


def motion_unet() -> UNetMotionModel:
    adapter = seeded(
        MotionAdapter,
        5,
        block_out_channels=(16, 32),
        motion_layers_per_block=1,
        motion_num_attention_heads=2,
        motion_norm_num_groups=8,
    )
    return UNetMotionModel.from_unet2d(tiny_unet(), adapter).eval()


def test_animatediff_merges_pixels_and_never_frames() -> None:
    unet = motion_unet()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 4, 6, 8, 12, generator=generator), torch.tensor(500)
    text = torch.randn(6, 7, 16, generator=generator)
    with torch.no_grad():
        before = unet(*inputs, text).sample
        handle = apply_mame(unet, tau=0.2, min_tokens=1)
        assert not torch.equal(unet(*inputs, text).sample, before)
        report = handle.report()
        assert not any("motion" in layer.name for layer in report.layers)
        assert {layer.size for layer in report.layers} == {(8, 12), (4, 6)}
        remove_mame(unet)
        assert torch.equal(unet(*inputs, text).sample, before)


def test_stable_video_merges_pixels_and_never_frames() -> None:
    unet = seeded(
        UNetSpatioTemporalConditionModel,
        0,
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=16,
        num_attention_heads=(2, 4),
        projection_class_embeddings_input_dim=96,
        addition_time_embed_dim=32,
        num_frames=3,
    )
    generator = torch.Generator().manual_seed(0)
    inputs = (
        torch.randn(1, 3, 8, 8, 12, generator=generator),
        torch.tensor(500),
        torch.randn(1, 1, 16, generator=generator),
        torch.ones(1, 3),
    )
    with torch.no_grad():
        before = unet(*inputs).sample
        handle = apply_mame(unet, tau=0.2, min_tokens=1)
        assert not torch.equal(unet(*inputs).sample, before)
    report = handle.report()
    assert not any("temporal" in layer.name for layer in report.layers)
    assert {layer.size for layer in report.layers} == {(8, 12), (4, 6)}


@pytest.mark.parametrize("kind", ["dit", "pixart"])
def test_transformers_count_patches(kind: str) -> None:
    shared: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 1}
    shared |= {"sample_size": 16, "patch_size": 2, "norm_elementwise_affine": False}
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(2, 4, 16, 16, generator=generator)
    if kind == "dit":
        model = seeded(DiTTransformer2DModel, 0, out_channels=8, num_embeds_ada_norm=10, **shared)
        inputs: dict[str, Any] = {"timestep": torch.tensor([5, 5]), "class_labels": torch.tensor([1, 2])}
    else:
        model = seeded(
            PixArtTransformer2DModel, 0, out_channels=8, cross_attention_dim=16, caption_channels=16, **shared
        )
        inputs = {
            "timestep": torch.tensor([5, 5]),
            "encoder_hidden_states": torch.randn(2, 7, 16, generator=generator),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        }
    with torch.no_grad():
        handle = apply_mame(model, tau=0.0, min_tokens=1)
        model(sample, **inputs)
    (layer,) = handle.report().layers
    assert (layer.tokens_in, layer.size, layer.merged) == (64, (8, 8), True)


def test_single_attention_module() -> None:
    attn, x = attention(), tokens()
    before = attn(x)
    handle = apply_mame(attn, tau=0.3, min_tokens=1)
    hooked = attn(x)
    assert handle.report().layers[0].name == "Attention"
    remove_mame(attn)
    assert torch.equal(attn(x), before)
    attn.set_processor(MaMeAttnProcessor(tau=0.3, min_tokens=1))
    assert torch.equal(attn(x), hooked)


def test_set_changes_the_next_forward() -> None:
    unet = tiny_unet()
    before = run_unet(unet)
    handle = apply_mame(unet, **MERGING)
    merged = run_unet(unet)
    handle.set(tau=1.0)
    torch.testing.assert_close(run_unet(unet), before)
    with pytest.raises(ValueError, match="tau"):
        handle.set(tau=2)
    assert handle.config.tau == 1.0
    handle.set(tau=0.2)
    assert torch.equal(run_unet(unet), merged)
    handle.set(MaMeConfig(keep=0.4, min_tokens=40))
    assert handle.config == MaMeConfig(keep=0.4, min_tokens=40)
    remove_mame(unet)
    with pytest.raises(RuntimeError, match="apply_mame again"):
        handle.set(tau=0.3)


def test_applying_again_replaces() -> None:
    unet = tiny_unet()
    first = apply_mame(unet, **MERGING)
    merged = run_unet(unet)
    second = apply_mame(unet, keep=0.4, min_tokens=40)
    assert not first.installed
    assert second.installed
    assert not torch.equal(run_unet(unet), merged)
    assert first.report().layers[0].calls == 1
    first.remove()  # not what is installed now: nothing happens
    assert second.installed
    apply_mame(unet, **MERGING)
    assert torch.equal(run_unet(unet), merged)


def test_removing_twice_or_without_applying_is_nothing() -> None:
    unet = tiny_unet()
    before = run_unet(unet)
    remove_mame(unet)
    handle = apply_mame(unet, **MERGING)
    handle.remove()
    remove_mame(unet)
    assert not has_hooks(unet)
    assert torch.equal(run_unet(unet), before)


def test_failed_apply_changes_nothing() -> None:
    unet = tiny_unet()
    handle = apply_mame(unet, **MERGING)
    with pytest.raises(ValueError, match="tau"):
        apply_mame(unet, tau=7)
    assert handle.installed


def test_contexts_nest_and_restore() -> None:
    unet = tiny_unet()
    before = run_unet(unet)
    with mame(unet, **MERGING) as outer:
        merged = run_unet(unet)
        with mame(unet, keep=0.4, min_tokens=40) as inner:
            assert inner.installed
            assert not torch.equal(run_unet(unet), merged)
        assert outer.installed
        assert torch.equal(run_unet(unet), merged)
        with pytest.raises(KeyError), mame(unet, keep=0.4):
            raise KeyError
        assert outer.installed
        with mame(unet, keep=0.4):
            remove_mame(unet)
        assert outer.installed
        with mame(unet.down_blocks[0], keep=0.4):
            assert not outer.installed
        assert outer.installed
    assert torch.equal(run_unet(unet), before)
    assert not has_hooks(unet)
    assert outer.report().layers[0].calls == 2


def test_deepcopy_merges_with_its_own_weights_and_counters() -> None:
    unet = tiny_unet()
    handle = apply_mame(unet, **MERGING)
    merged = run_unet(unet)
    twin = copy.deepcopy(unet)
    assert torch.equal(run_unet(twin), merged)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.1)
    changed = run_unet(twin)
    assert not torch.equal(changed, merged)
    assert torch.equal(run_unet(unet), merged)
    assert {layer.calls for layer in handle.report().layers} == {2}
    fresh = tiny_unet()
    fresh.load_state_dict(twin.state_dict())
    apply_mame(fresh, **MERGING)
    assert torch.equal(run_unet(fresh), changed)
    remove_mame(fresh)
    remove_mame(twin)
    assert torch.equal(run_unet(twin), run_unet(fresh))


def test_state_dict_and_saving_are_unchanged(tmp_path: Any) -> None:
    unet = tiny_unet()
    names = set(unet.state_dict())
    apply_mame(unet, **MERGING)
    run_unet(unet)
    assert set(unet.state_dict()) == names
    unet.save_pretrained(tmp_path)
    assert not has_hooks(type(unet).from_pretrained(tmp_path))


def test_capture_keeps_the_latest_plans() -> None:
    unet = tiny_unet()
    handle = apply_mame(unet, **MERGING)
    run_unet(unet)
    assert handle.plans() == {}
    handle.capture()
    run_unet(unet, height=8, width=24)
    plans = handle.plans()
    assert len(plans) == 7
    sizes = {layer.name: layer.size for layer in handle.report().layers}
    for name, plan in plans.items():
        size = sizes[name]
        assert size is not None
        assert plan.owners().shape == (2, size[0] * size[1])
    handle.capture(False)
    assert handle.plans() == {}


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (tiny_vae, ValueError, "found none that can merge in AutoencoderKL"),
        (lambda: tiny_text_encoder(tiny_tokenizer()), ValueError, "found none that can merge"),
        (added_kv_unet, ValueError, "found none that can merge in UNet2DConditionModel"),
        (lambda: 3, TypeError, "got int"),
    ],
    ids=["vae", "text-encoder", "added-kv", "int"],
)
def test_refused_targets(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        apply_mame(build(), tau=0.8)


def test_processor_and_hooks_do_not_merge_twice() -> None:
    unet = tiny_unet()
    unet.set_attn_processor(MaMeAttnProcessor(**MERGING))
    expected = run_unet(unet)
    with pytest.raises(ValueError, match="merge twice: call remove_mame first"):
        apply_mame(unet, **MERGING)
    remove_mame(unet)
    apply_mame(unet, keep=0.1, min_tokens=1)
    unet.set_attn_processor(MaMeAttnProcessor(**MERGING))
    assert torch.equal(run_unet(unet), expected)


def test_autoencoder_and_text_encoder_of_a_pipeline_are_not_hooked() -> None:
    pipe = tiny_pipeline()
    apply_mame(pipe, **MERGING)
    assert has_hooks(pipe.unet)
    assert not has_hooks(pipe.vae)
    assert not has_hooks(pipe.text_encoder)


@pytest.mark.parametrize("fields", [CONFIGS["tau"], CONFIGS["keep"]], ids=["tau", "keep"])
def test_compiled_calls_are_counted_without_recompiling(fields: dict[str, Any]) -> None:
    torch._dynamo.reset()
    attn: Attention = attention()
    inputs = [tokens(), *(tokens().roll(k, 0) * torch.linspace(0.1, k, 64)[:, None] + k for k in (1, 2, 3))]
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


@pytest.mark.parametrize(
    ("fields", "capture", "graphs"),
    [(CONFIGS["keep"], False, 1), (CONFIGS["tau"], False, None), (CONFIGS["tau"], True, 1)],
    ids=["keep", "tau", "tau-captured"],
)
def test_graphs_of_a_compiled_layer(fields: dict[str, Any], capture: bool, graphs: int | None) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    attn = attention()
    apply_mame(attn, min_tokens=1, **fields)
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=capture):
        expected = attn(tokens())
        torch.testing.assert_close(torch.compile(attn, backend="eager")(tokens()), expected)
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert made == graphs if graphs else made > 1


def test_hooks_of_others_stay_in_force() -> None:
    class Negate(ModelHook):
        def new_forward(self, module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            return -self.fn_ref.original_forward(*args, **kwargs)

    attn, x = attention(), tokens()
    before = attn(x)
    registry = HookRegistry.check_if_exists_or_initialize(attn)
    registry.register_hook(Negate(), "below")
    apply_mame(attn, tau=0.3, min_tokens=1)
    hooked = attn(x)
    registry.register_hook(Negate(), "above")
    assert torch.equal(attn(x), -hooked)
    remove_mame(attn)
    assert torch.equal(attn(x), before)
    registry.remove_hook("above")
    assert torch.equal(attn(x), -before)


def test_works_in_inference_mode_and_out_of_it() -> None:
    unet = tiny_unet()
    with torch.inference_mode():
        handle = apply_mame(unet, **MERGING)
        inside = run_unet(unet)
        handle.reset()
    assert torch.equal(run_unet(unet), inside)
    handle.reset()


def test_video_unet_merges_pixels_and_never_frames() -> None:
    unet = seeded(
        UNet3DConditionModel,
        0,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        layers_per_block=1,
        norm_num_groups=8,
    )
    generator = torch.Generator().manual_seed(0)
    video, text = torch.randn(1, 4, 3, 8, 12, generator=generator), torch.randn(1, 7, 16, generator=generator)
    handle = apply_mame(unet, tau=0.1, min_tokens=1)
    with torch.no_grad():
        unet(video, torch.tensor(500), text)
    assert {layer.size for layer in handle.report().layers} == {(8, 12), (4, 6)}


def test_i2vgen_is_hooked_on_pixels_and_never_on_frames() -> None:
    unet = seeded(
        I2VGenXLUNet,
        0,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        layers_per_block=1,
        norm_num_groups=8,
    )
    assert any(
        "image_latents_temporal_encoder" in path and isinstance(m, Attention) for path, m in unet.named_modules()
    )
    hooked = [layer.name for layer in apply_mame(unet, tau=0.1, min_tokens=1).report().layers]
    assert hooked
    assert all(".attentions." in name and name.endswith("attn1") for name in hooked)


def test_image_tokens_among_others_are_left_alone() -> None:
    unet = tiny_unet(attention_type="gated", cross_attention_dim=16)
    handle = apply_mame(unet, **MERGING)
    generator = torch.Generator().manual_seed(0)
    boxes = {
        "boxes": torch.rand(2, 3, 4, generator=generator),
        "positive_embeddings": torch.randn(2, 3, 16, generator=generator),
        "masks": torch.ones(2, 3),
    }
    with torch.no_grad():
        unet(**unet_inputs(unet), cross_attention_kwargs={"gligen": boxes})
    layers = handle.report().layers
    assert {layer.merged for layer in layers if layer.name.endswith("attn1")} == {True}
    grounded = [layer for layer in layers if "fuser" in layer.name]
    assert len(grounded) == 7
    assert {layer.merged for layer in grounded} == {False}
    assert grounded[0].reason == "259 tokens are not those of 16 x 16"


def test_gradients_under_checkpointing() -> None:
    unet = tiny_unet().train()
    apply_mame(unet, **MERGING)
    inputs = unet_inputs(unet, height=8, width=24)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            unet.enable_gradient_checkpointing()
        unet.zero_grad()
        unet(**inputs).sample.square().mean().backward()
        gradients.append([p.grad.clone() for p in unet.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(list(unet.parameters()))
    torch.testing.assert_close(gradients[1], gradients[0])


def test_adapters_loaded_after_applying_take_part() -> None:
    peft = pytest.importorskip("peft")
    unet = tiny_unet()
    apply_mame(unet, **MERGING)
    before = run_unet(unet)
    unet.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v"]))
    assert torch.equal(run_unet(unet), before)  # a new adapter adds nothing
    with torch.no_grad():
        for name, parameter in unet.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    assert not torch.equal(run_unet(unet), before)


def test_regional_compilation_of_the_processor_shares_graphs() -> None:
    torch._dynamo.reset()
    unet = tiny_unet()
    unet.set_attn_processor(MaMeAttnProcessor(keep=0.4, min_tokens=40))
    expected = run_unet(unet)
    for attention_model in unet.up_blocks[1].attentions:
        attention_model.transformer_blocks[0].compile(backend="eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    torch.testing.assert_close(run_unet(unet), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


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
