"""Test apply_mame on real models: outputs, removal, and settings that change live."""

from __future__ import annotations

import copy
from types import SimpleNamespace as Pipe
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch.utils.checkpoint import checkpoint

from mame_sd import MaMeAttnProcessor, MaMeConfig, NothingMergedError, apply_mame, remove_mame
from mame_sd.core.guidance import partition_index
from mame_sd.diffusion.apply_denoiser import hooks_on
from mame_sd.diffusion.context import HandleState, ResolvedConfig
from mame_sd.diffusion.hooks import StepHook
from tests.builders.layers import CONFIGS
from tests.builders.pipelines import sd
from tests.builders.tiny import run_unet, tiny_sdxl_unet, tiny_unet, unet_inputs
from tests.builders.transformers import run
from tests.matrix.models.registry import MODELS

SIZES = [(16, 16), (8, 24), (12, 20)]
MERGING = {"tau": 0.2, "min_tokens": 40}


@pytest.mark.parametrize("name", CONFIGS)
def test_bit_equal_to_the_processor_and_after_removal(name: str) -> None:
    """Test each setting; models and sizes alternate."""
    number, fields = list(CONFIGS).index(name), CONFIGS[name]
    unet: Any = (tiny_unet, tiny_sdxl_unet)[number % 2]()
    size = SIZES[number % 3]
    shape = {"height": size[0], "width": size[1]}
    before = run_unet(unet, **shape)
    # The processor sees no steps and no MLPs.
    unseen = {} if "tau" in fields else {"redraw": False, "mlp_keep": 1}
    apply_mame(unet, min_tokens=40, **unseen, **fields)
    hooked = run_unet(unet, **shape)
    assert not torch.equal(hooked, before)
    remove_mame(unet)
    assert torch.equal(run_unet(unet, **shape), before)
    unet.set_attn_processor(MaMeAttnProcessor(min_tokens=40, size=size, **fields))
    assert torch.equal(run_unet(unet, **shape), hooked)
    remove_mame(unet)
    assert torch.equal(run_unet(unet, **shape), before)
    assert all(type(p) is AttnProcessor2_0 for p in unet.attn_processors.values())


def at(unet: Any, timestep: Any, **fields: Any) -> torch.Tensor:
    with torch.no_grad(), apply_mame(unet, keep=0.25, min_tokens=40, **fields):
        output: torch.Tensor = unet(**{**unet_inputs(unet), "timestep": timestep}).sample
    return output


def test_each_timestep_has_destinations_of_its_own_whatever_ran_before() -> None:
    unet = tiny_unet()
    once = at(unet, torch.tensor(500), redraw=False)
    first = at(unet, torch.tensor(500))
    assert partition_index(500).item() != 0
    assert not torch.equal(first, once)
    at(unet, torch.tensor(20))
    for again in (500, torch.tensor(500.0), torch.tensor([500, 500])):
        assert torch.equal(at(unet, again), first)
    seeds = [at(unet, torch.tensor(500), seed=seed) for seed in (1, 2)]
    assert not torch.equal(*seeds)


@pytest.mark.parametrize("fields", [{"keep": 0.25}, {"tau": 0.5}], ids=str)
def test_a_policy_begins_as_its_reference(fields: dict[str, Any]) -> None:
    """A call merges alike with and without gradients: a batch of timesteps, and a guided pair."""
    policy = tiny_unet()
    reference = copy.deepcopy(policy)
    pair = unet_inputs(policy)
    pair["sample"] = pair["sample"][:1].repeat(2, 1, 1, 1)
    for inputs in ({**unet_inputs(policy), "timestep": torch.tensor([300, 700])}, pair):
        for model in (policy, reference):
            apply_mame(model, min_tokens=40, **fields)
        learned = policy(**inputs).sample
        assert learned.requires_grad
        with torch.no_grad():
            torch.testing.assert_close(reference(**inputs).sample, learned, rtol=0, atol=1e-6)


def test_a_model_that_checkpoints_takes_the_first_draw_while_it_learns() -> None:
    unet = tiny_unet()
    unet.enable_gradient_checkpointing()
    outputs = []
    for redraw in (True, False):
        apply_mame(unet, keep=0.25, min_tokens=40, redraw=redraw)
        learned = unet(**unet_inputs(unet)).sample
        assert torch.equal(run_unet(unet.train()), learned)  # the reference: adapter off
        outputs += [learned, run_unet(unet.eval())]
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def test_a_block_is_not_computed_again_at_another_timestep() -> None:
    unet = tiny_unet()
    apply_mame(unet, keep=0.25, min_tokens=40)
    block = unet.mid_block
    forward = block.forward
    block.forward = lambda *given, **named: checkpoint(
        forward, *given, use_reentrant=False, **named
    )
    inputs = unet_inputs(unet)
    for _ in range(2):
        loss = unet(**inputs).sample.sum()
        run_unet(unet)  # at the same timestep
        loss.backward()
    loss = unet(**inputs).sample.sum()
    with torch.no_grad():
        unet(**{**inputs, "timestep": torch.tensor(20)})
    with pytest.raises(RuntimeError, match="before the model's next timestep"):
        loss.backward()
    unet(**inputs).sample.sum().backward()


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


def test_tokens_of_images_that_are_left_alone_are_counted() -> None:
    case = MODELS["UNet2DModel"]
    unet = case.build()
    handle = apply_mame(unet, min_tokens=100)
    run(case.inputs(), unet)
    with pytest.raises(NothingMergedError, match="and the largest has 96 tokens"):
        handle.report()
    handle.set(min_tokens=16)
    handle.set(layers={"mid_block*": False})
    handle.reset()
    run(case.inputs(), unet)
    assert {layer.tokens_in for layer in handle.report().layers} == {96, 24}


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
    handle.active = False
    assert torch.equal(run_unet(unet), before)


def test_applying_again_replaces() -> None:
    unet = tiny_unet()
    first = apply_mame(unet, **MERGING)
    merged = run_unet(unet)
    second = apply_mame(unet, keep=0.4, min_tokens=40)
    assert not first.installed
    assert second.installed
    assert not torch.equal(run_unet(unet), merged)
    assert first.report().layers[0].calls == 1
    first.remove()  # it is not installed any more, so nothing happens
    with pytest.raises(ValueError, match="tau"):
        apply_mame(unet, tau=7)
    assert second.installed
    apply_mame(unet, **MERGING)
    assert torch.equal(run_unet(unet), merged)


def test_a_block_removes_its_own_merging_at_its_end() -> None:
    unet = tiny_unet()
    before = run_unet(unet)
    with apply_mame(unet, **MERGING) as first:
        assert first.installed
        assert not torch.equal(run_unet(unet), before)
    assert not hooks_on(unet)
    with pytest.raises(KeyError), apply_mame(unet, **MERGING):
        raise KeyError
    assert not hooks_on(unet)
    with first as again, pytest.raises(RuntimeError, match="removed or replaced"):
        again.set(keep=0.5)  # a block applies nothing
    with apply_mame(unet, keep=0.4, min_tokens=40):
        later = apply_mame(unet, **MERGING)
    assert later.installed
    later.remove()
    assert torch.equal(run_unet(unet), before)
    assert later.report().layers[0].calls == 0


def test_settings_of_a_thread_may_end_in_any_order() -> None:
    handle = apply_mame(tiny_unet(), min_tokens=40, keep=0.7)
    first, second = handle.using(keep=0.5), handle.using(keep=0.4)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert handle.config.keep == 0.4
    second.__exit__(None, None, None)
    assert handle.config.keep == 0.7


@pytest.mark.parametrize("name", ["unet", "transformer_ref"])
def test_a_denoiser_that_was_replaced_or_came_later_is_told(name: str) -> None:
    pipe = Pipe(transformer=tiny_unet(), unet=tiny_unet())
    if name != "transformer_ref":
        setattr(pipe, name, tiny_unet())
    handle = apply_mame(pipe, **MERGING)
    for model in vars(pipe).values():
        run_unet(model)
    assert handle.report()
    setattr(pipe, name, tiny_unet())
    came = "UNet2DConditionModel came after" if name == "transformer_ref" else "another UNet2D"
    with pytest.raises(NothingMergedError, match=rf"on pipe\.{name}, but .*{came}.*apply_mame"):
        handle.report()
    with pytest.raises(RuntimeError, match=came):
        handle.set(tau=0.3)
    with pytest.raises(RuntimeError, match="call apply_mame again"), handle.using(tau=0.3):
        pass
    setattr(pipe, name, None)  # dropped to free memory, so nothing can merge
    assert handle.report()
    remove_mame(handle.root)
    setattr(pipe, name, tiny_unet())
    assert handle.report()  # of earlier calls


def test_merging_is_taken_off_a_denoiser_that_left_its_pipeline() -> None:
    pipe: Any = sd("StableDiffusionPipeline", unet=tiny_unet())
    unet, handle = pipe.unet, apply_mame(pipe, **MERGING)
    assert repr(handle) == (
        "MaMeHandle(tau=0.2, min_tokens=40: UNet2DConditionModel with 7 self-attentions)"
    )
    pipe.unet = None
    remove_mame(pipe)
    assert not hooks_on(unet)
    remove_mame(pipe)  # there is nothing left to remove
    assert repr(handle).endswith("self-attentions, removed or replaced)")
    with pytest.raises(TypeError, match="expected a torch module or a diffusers pipeline"):
        remove_mame(Pipe())


def test_blocks_that_were_replaced_are_told() -> None:
    unet = tiny_unet()
    handle = apply_mame(unet, **MERGING)
    unet.down_blocks[0] = tiny_unet().down_blocks[0]
    run_unet(unet)
    reasons = {layer.name.startswith("down_blocks.0"): layer for layer in handle.report().layers}
    assert reasons[True].reason.startswith("no longer part of the model")
    assert reasons[False].merged


@pytest.mark.parametrize("fields", [{"tau": 0.2}, {"keep": 1, "mlp_keep": 0.25, "block_keep": 0.5}])
def test_deepcopy_merges_with_its_own_weights_and_counters(fields: dict[str, Any]) -> None:
    unet = tiny_unet()
    handle = apply_mame(unet, min_tokens=40, **fields)
    merged = run_unet(unet)
    twin = copy.deepcopy(unet)
    assert torch.equal(run_unet(twin), merged)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.1)
    assert not torch.equal(run_unet(twin), merged)
    assert torch.equal(run_unet(unet), merged)
    assert {layer.calls for layer in handle.report().layers} == {2}
    remove_mame(twin)
    assert handle.installed
    assert not hooks_on(twin)


def test_processor_and_hooks_do_not_merge_twice() -> None:
    unet = tiny_unet()
    unet.set_attn_processor(MaMeAttnProcessor(**MERGING))
    expected = run_unet(unet)
    with pytest.raises(ValueError, match="merge twice: call remove_mame first"):
        apply_mame(unet, **MERGING)
    remove_mame(unet)
    for fields in ({"keep": 0.1}, {"tau": 0.0}):
        apply_mame(unet, min_tokens=1, **fields)
        unet.set_attn_processor(MaMeAttnProcessor(**MERGING))
        assert torch.equal(run_unet(unet), expected)
        remove_mame(unet)


@pytest.mark.parametrize("axis", [1, 2], ids=["motion", "stable video"])
def test_frames_are_no_pair_however_many_run_at_once(axis: int) -> None:
    """Two videos of one frame, which run as a chunk of two frames, merge frame by frame."""
    unet = tiny_unet()
    hook = StepHook(unet, shared := HandleState(ResolvedConfig(MaMeConfig(), True, MaMeConfig())))
    video = torch.zeros(2, 4, 8, 8).unsqueeze(axis)
    hook(unet, (video, 5, None), {})
    assert shared.step.value.step().leader is None
    images = video.squeeze(axis)  # held, as by the call of a model
    hook(unet, (images, 5, None), {})
    assert shared.step.value.step().leader.tolist() == [1, 1]


def test_a_model_refuses_a_size_that_it_tells_itself() -> None:
    unet = tiny_unet()
    message = (
        r"^size: expected none, for .* tells its height and width, got \(3, 5\); leave it out$"
    )
    with pytest.raises(ValueError, match=message):
        apply_mame(unet, size=(3, 5))
    handle = apply_mame(unet, min_tokens=40)
    with pytest.raises(ValueError, match=message):
        handle.set(size=(3, 5))


class PositionalSelf(Attention):
    def forward(self, /, hidden_states: torch.Tensor, *others: Any, **more: Any) -> Any:
        return super().forward(hidden_states, *others, **more)


def test_a_layer_is_called_by_the_names_of_its_forward() -> None:
    attn = PositionalSelf(query_dim=32, heads=2, dim_head=16)
    handle = apply_mame(attn, keep=0.5, min_tokens=16)
    with torch.no_grad():
        attn(torch.randn(1, 64, 32))
    assert handle.report().layers[0].tokens_kept == 32


def guided(unet: Any, **fields: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of an unguided and a guided sample of the same latents."""
    inputs = unet_inputs(unet)
    inputs["sample"] = inputs["sample"][:1].repeat(2, 1, 1, 1)
    with torch.no_grad(), apply_mame(unet, min_tokens=40, **fields):
        output: torch.Tensor = unet(**inputs).sample
    return output[0], output[1]


def test_a_guided_pair_merges_by_the_guided_sample_alone() -> None:
    unet = tiny_unet()
    first, second = guided(unet)
    other, alone = guided(unet, share_guidance_plan=False)
    torch.testing.assert_close(second, alone)
    assert not torch.equal(first, other)
