"""Test which calls of a model share groups: those of the same input, for guidance in two calls."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import Tensor, nn

from mame_sd import apply_mame, remove_mame
from mame_sd.core.groups import Groups
from mame_sd.diffusion import hooks
from mame_sd.diffusion.hook_registry import hook_on
from tests.builders.pipelines import SIDE, controlnet, noise
from tests.builders.processes import in_thread
from tests.builders.tiny import LATENT, one_level_unet, run_unet, tiny_unet, unet_inputs
from tests.builders.transformers import normal, run
from tests.matrix.models.case import Case
from tests.matrix.models.registry import MODELS
from tests.matrix.transformers import SD35, run_wan22, wan22


def with_another_text(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of the call for the negative prompt."""
    return {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"].neg()}


def called_twice(
    between: Callable[[Any, dict[str, Any]], Any], planned: list[Groups], **fields: Any
) -> bool:
    """Return True if a second call, for another text after `between`, reuses the first's plans."""
    model = tiny_unet()
    inputs = {**unet_inputs(model), "timestep": torch.tensor(500)}
    handle = apply_mame(model, **{"min_tokens": 40, **fields})
    with torch.no_grad():
        model(**inputs)
        between(handle, inputs)
        assert planned
        planned.clear()
        model(**with_another_text(inputs))
    return not planned


def other(name: str, change: Callable[[Tensor], Any]) -> Callable[[Any, dict[str, Any]], None]:
    return lambda handle, inputs: inputs.update({name: change(inputs[name])})


def elsewhere(handle: Any, inputs: dict[str, Any]) -> None:
    """Call the model with the same input in another thread, which shares nothing with this."""

    def work() -> None:
        with torch.no_grad():
            handle.root(**inputs)

    in_thread(work)


def test_a_call_that_is_repeated_stands_alone(planned: list[Groups]) -> None:
    """A repeated call, perhaps with other weights, gives the same output whatever ran before."""
    model = tiny_unet()
    apply_mame(model, min_tokens=40)
    inputs = unet_inputs(model)
    with torch.no_grad():
        for _ in range(3):
            planned.clear()
            model(**inputs)
            assert planned
        planned.clear()
        model(**with_another_text(inputs))
        assert not planned, "the last one was guidance's"


def turned_off_for_a_call(handle: Any, inputs: dict[str, Any]) -> None:
    handle.set(share_guidance_plan=False)
    handle.root(**inputs)
    handle.set(share_guidance_plan=True)


def unknown(handle: Any, inputs: dict[str, Any]) -> None:
    """Call the model with latents of a subclass, whose changes PyTorch doesn't count."""
    handle.root(**{**inputs, "sample": inputs["sample"].as_subclass(nn.Buffer)})


BETWEEN: dict[str, tuple[Callable[[Any, dict[str, Any]], Any], bool]] = {
    "nothing": (lambda handle, inputs: None, True),
    "a shorter text": (other("encoder_hidden_states", lambda t: t[:, 1:]), True),
    "a third call": (lambda handle, inputs: handle.root(**with_another_text(inputs)), True),
    "an equal timestep": (other("timestep", torch.clone), True),
    "another timestep": (other("timestep", lambda t: t - 20), False),
    "a timestep changed in place": (other("timestep", lambda t: t.sub_(20)), False),
    "equal latents": (other("sample", torch.clone), False),
    "latents changed in place": (other("sample", lambda t: t.mul_(2)), False),
    "other settings": (lambda handle, inputs: handle.set(keep=0.5), False),
    "turned off for a call": (turned_off_for_a_call, False),
    "reset": (lambda handle, inputs: handle.reset(), False),
    "reset by another thread": (lambda handle, inputs: in_thread(handle.reset), True),
    "put back": (lambda handle, inputs: (remove_mame(handle.root), handle.install()), False),
    "a call of what is not known": (unknown, False),
    "another thread": (elsewhere, True),
}


@pytest.mark.parametrize(("between", "shared"), BETWEEN.values(), ids=BETWEEN)
def test_the_second_call_follows_where_latents_and_timestep_are_the_same(
    between: Any, shared: bool, planned: list[Groups]
) -> None:
    assert called_twice(between, planned) == shared


def block_of(model: Any) -> Any:
    return model.down_blocks[0].attentions[0].transformer_blocks[0]


def call_alone(layer: Any, **given: Tensor) -> None:
    """Call a block, or its self-attention, by itself."""
    with torch.no_grad():
        layer(normal(2, LATENT * LATENT, 16), **given)


def kept_for(planned: list[Groups]) -> list[weakref.ref[Any]]:
    """Return weak references to the plans that were made, alive if something keeps them."""
    references = [weakref.ref(plan.row) for plan in planned]
    planned.clear()
    return references


def test_blocks_called_by_themselves_plan_for_themselves(planned: list[Groups]) -> None:
    """Call blocks before, between and after calls of the model with the same latents."""
    model = tiny_unet()
    apply_mame(model, min_tokens=40)
    inputs, block = unet_inputs(model), block_of(model)
    text = {"encoder_hidden_states": inputs["encoder_hidden_states"]}
    with torch.no_grad():
        model(**inputs)
        once = len(planned)
        call_alone(block, **text)
        assert len(planned) == once + 1
        made = []

        def beside(*_: Any) -> None:
            in_thread(lambda: call_alone(block.attn1))
            made.append(len(planned))

        hook = block.register_forward_pre_hook(beside)
        model(**with_another_text(inputs))
        hook.remove()
        assert made == [once + 2], "a call beside the model's makes its own"
        assert len(planned) == once + 2, "the model's second none"
    call_alone(block, **text)
    assert len(planned) == once + 3


@pytest.mark.parametrize("end", ["error", "interruption", "removal"])
def test_a_call_that_ends_early_leaves_no_plans_to_others(end: str, planned: list[Groups]) -> None:
    model = tiny_unet()
    handle = apply_mame(model, min_tokens=40)
    inputs, late = unet_inputs(model), model.up_blocks[1].attentions[0].transformer_blocks[0].attn1

    def stop(*args: Any) -> None:
        if end == "removal":
            handle.remove()
        raise KeyboardInterrupt if end == "interruption" else ValueError

    with torch.no_grad():
        model(**inputs)
        model.mid_block.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt if end == "interruption" else ValueError):
            model(**with_another_text(inputs))
    handle.install()
    if end == "interruption":  # PyTorch calls no hook then
        inputs.clear()
    kept = kept_for(planned)
    for i in range(3):
        call_alone(late)
        assert len(planned) == i + 1
    if end != "error":
        assert not any(plan() is not None for plan in [*kept, *kept_for(planned)])


def test_control_images_of_one_input_merge_apart(planned: list[Groups]) -> None:
    """A union ControlNet is called for each of its images, with the same latents."""
    net = controlnet()
    apply_mame(net, min_tokens=40)
    inputs = {**unet_inputs(tiny_unet()), "timestep": torch.tensor(500)}
    with torch.no_grad():
        for seed in range(2):
            before = len(planned)
            net(**inputs, controlnet_cond=noise(2, 3, SIDE, SIDE, seed=seed))
            assert len(planned) > before


@pytest.mark.compiles
def test_a_compiled_model_and_its_calls_stand_alone(graphs: Counter[str]) -> None:
    model = one_level_unet(transformer_layers_per_block=1)
    guided = {**unet_inputs(model, batch=1), "timestep": torch.tensor(500)}
    unguided = with_another_text(guided)
    apply_mame(model, keep=0.25, min_tokens=1)
    alone = run({**unguided, "sample": guided["sample"].clone()}, model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    run(guided, compiled)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(run(unguided, compiled), alone)
    # Its own graph, and a small one of the hook that reads the step.
    assert graphs["unique_graphs"] == 2


@pytest.mark.parametrize("end", ["latents", "turned off"])
def test_plans_go_with_the_latents_the_thread_and_the_setting(
    end: str, planned: list[Groups]
) -> None:
    model = tiny_unet()
    handle = apply_mame(model, min_tokens=40)
    inputs = unet_inputs(model)
    elsewhere(handle, inputs)
    assert planned
    assert not any(plan() is not None for plan in kept_for(planned))
    with torch.no_grad():
        model(**inputs)
        kept = kept_for(planned)
        assert all(plan() is not None for plan in kept)
        if end == "latents":
            inputs.clear()
        else:
            handle.set(share_guidance_plan=False)
            model(**inputs)
    assert not any(plan() is not None for plan in kept)


def first_input_has_no_tensor(model: Any, inputs: dict[str, Any]) -> None:
    """Pass the latents in a list, as Z-Image does."""
    own = model.forward
    model.forward = lambda sample, timestep, encoder_hidden_states: own(
        sample[0], timestep, encoder_hidden_states
    )
    inputs["sample"] = [inputs["sample"]]


def captured(model: Any, inputs: dict[str, Any]) -> None:
    """Pretend that a CUDA graph is being captured, which would need a GPU."""
    hooks._is_recorded = lambda t: True


def unchanged(model: Any, inputs: dict[str, Any]) -> None:
    """Change nothing: only the mode of the call differs."""


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        (first_input_has_no_tensor, torch.no_grad),
        (captured, torch.no_grad),
        (unchanged, torch.inference_mode),
        (unchanged, torch.enable_grad),
    ],
)
def test_nothing_is_kept_where_calls_can_not_be_told_apart(
    case: Any, mode: Any, planned: list[Groups], monkeypatch: pytest.MonkeyPatch
) -> None:
    # monkeypatch restores it afterwards.
    monkeypatch.setattr(hooks, "_is_recorded", hooks._is_recorded)
    model = tiny_unet()
    apply_mame(model, min_tokens=40)
    with mode():
        inputs = {key: value.clone() for key, value in unet_inputs(model).items()}
        case(model, inputs)
        model(**inputs)
        once = len(planned)
        model(**with_another_text(inputs))
    assert len(planned) == 2 * once > 0
    assert not any(plan() is not None for plan in kept_for(planned))


@pytest.mark.parametrize("cleared", [False, True])
def test_removal_leaves_no_hook(cleared: bool) -> None:
    model = tiny_unet()
    handle = apply_mame(model, min_tokens=40)
    if cleared:  # by another tool
        model._forward_hooks.clear()
    with torch.no_grad():
        copy.deepcopy(model)(**unet_inputs(model))
    copied = copy.deepcopy(model)
    for target in (model, copied):
        assert bool(target._forward_hooks) != cleared
        remove_mame(target)
        for name in ("_forward_hooks", "_forward_hooks_always_called", "_forward_pre_hooks"):
            assert cleared or not getattr(target, name), name
    assert not handle.installed
    assert hook_on(copied, "mame_step") is None


def halves(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the inputs of the guided call of two samples, and of the unguided call."""
    inputs["hidden_states"] = inputs["hidden_states"][1:].repeat_interleave(2, 0)
    pair = {key for key, value in inputs.items() if len(value) == 2}
    parts = [
        {key: value[i : i + 1] if key in pair else value for key, value in inputs.items()}
        for i in (1, 0)
    ]
    parts[1]["hidden_states"] = parts[0]["hidden_states"]
    return parts


@pytest.mark.parametrize(
    "case",
    [MODELS["FluxTransformer2DModel"], MODELS["WanTransformer3DModel"], SD35],
    ids=lambda case: case.name,
)
def test_two_calls_give_what_a_batch_of_both_gives(case: Case, planned: list[Groups]) -> None:
    model, inputs = case.build(), case.inputs()
    guided, unguided = halves(inputs)
    rules = {"*0*": {"keep": 0.4, "fit_queries": 0}}
    handle = apply_mame(model, min_tokens=1, keep=0.25, layers=rules)
    both = run(inputs, model)
    planned.clear()
    first = run(guided, model)
    made = len(planned)
    second = run(unguided, model)
    assert len(planned) == made > 0
    torch.testing.assert_close(torch.cat([second, first]), both)
    unguided["hidden_states"] = unguided["hidden_states"].clone()  # equal, but another object
    run(unguided, model)
    assert len(planned) == 2 * made
    assert all(entry.calls == 4 for entry in handle.report().layers)


def test_a_layer_that_a_model_calls_twice_merges_anew_each_time(planned: list[Groups]) -> None:
    model, inputs = SD35.build(), SD35.inputs()
    first, *others = model.transformer_blocks
    model.transformer_blocks = torch.nn.ModuleList([first, first, *others])
    handle = apply_mame(model, min_tokens=1, keep=0.25)
    for number, half in enumerate(halves(inputs), 1):
        run(half, model)
        calls = [entry.calls for entry in handle.report().layers]
        assert max(calls) == 2 * number
        assert len(planned) == sum(calls) / number


class Twice(AttnProcessor2_0):
    """Attend to the tokens, and to the same tokens in reverse order."""

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        once = super().__call__(attn, hidden_states, *args, **kwargs)
        turned = super().__call__(attn, hidden_states.flip(1), *args, **kwargs)
        return once + turned


def test_each_of_two_attentions_of_a_layer_has_its_own_plan(planned: list[Groups]) -> None:
    outputs, made = [], []
    for shared in (True, False):
        unet = one_level_unet()
        unet.set_attn_processor(Twice())
        handle = apply_mame(unet, keep=0.5, min_tokens=16, share_guidance_plan=shared)
        planned.clear()
        outputs.append(run_unet(unet))
        made.append(len(planned))
        assert all(layer.merged for layer in handle.report().layers)
    assert torch.equal(*outputs)
    assert made[0] == made[1] > 0


def test_a_pipeline_that_calls_twice_plans_once(planned: list[Groups]) -> None:
    """Each transformer of Wan 2.2 takes two steps of two calls each."""
    pipe = wan22()
    handle = apply_mame(pipe, keep=0.25, min_tokens=1)
    for pairs, plans in ((True, 1), (False, 2)):
        handle.set(share_guidance_plan=pairs)
        handle.reset()
        planned.clear()
        run_wan22(pipe)
        layers = [entry for entry in handle.report().layers if entry.merged]
        assert layers, "something merges"
        assert all(entry.calls == 4 for entry in layers)
        assert len(planned) == plans * 2 * len(layers)
