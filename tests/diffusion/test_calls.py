"""Which calls of a model belong together: the second follows only where it is of the same input."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mame_sd import apply_mame, remove_mame
from mame_sd.core.merge import Groups
from mame_sd.diffusion import hooks
from mame_sd.diffusion.hook_registry import hook_on
from tests.builders.pipelines import SIDE, controlnet, noise
from tests.builders.threads import in_thread
from tests.builders.tiny import LATENT, one_level_unet, tiny_unet, unet_inputs
from tests.builders.transformers import normal, run


def with_another_text(inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs of the call for the negative prompt."""
    return {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"].neg()}


def called_twice(
    between: Callable[[Any, dict[str, Any]], Any], planned: list[Groups], **fields: Any
) -> bool:
    """Whether the second of two calls of a model, for another text, merges by the first one's
    plans, with something done in between.
    """
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
    """Another thread's call of the very same input, which shares nothing with this one's."""

    def work() -> None:
        with torch.no_grad():
            handle.root(**inputs)

    in_thread(work)


def test_a_call_that_is_repeated_stands_alone(planned: list[Groups]) -> None:
    """With other weights, perhaps: the same call gives the same, whatever ran before."""
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
    """A call whose latents are of a subclass, of which changes are not counted."""
    handle.root(**{**inputs, "sample": inputs["sample"].as_subclass(nn.Buffer)})


BETWEEN: dict[str, tuple[Callable[[Any, dict[str, Any]], Any], bool]] = {
    "nothing": (lambda handle, inputs: None, True),
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


def test_calls_stand_alone_in_inference_mode_and_with_gradients(planned: list[Groups]) -> None:
    model = tiny_unet()
    apply_mame(model, min_tokens=40)
    for mode in (torch.inference_mode, torch.enable_grad):
        with mode():
            inputs = {
                key: torch.as_tensor(value).clone() for key, value in unet_inputs(model).items()
            }
            planned.clear()
            model(**inputs)
            made = len(planned)
            model(**with_another_text(inputs))
            assert len(planned) == 2 * made > 0


def block_of(model: Any) -> Any:
    return model.down_blocks[0].attentions[0].transformer_blocks[0]


def call_alone(layer: Any, **given: Tensor) -> None:
    """A call of a block, or of its self-attention, with tokens of its own."""
    with torch.no_grad():
        layer(normal(2, LATENT * LATENT, 16), **given)


def kept_for(planned: list[Groups]) -> list[weakref.ref[Any]]:
    """What still knows, after this call, which of the plans that were made are kept somewhere, or
    who went where in them.
    """
    references = [weakref.ref(plan.row) for plan in planned]
    planned.clear()
    return references


def test_blocks_called_by_themselves_plan_for_themselves(planned: list[Groups]) -> None:
    """Between, beside and after calls of the model with the same latents."""
    model = tiny_unet()
    apply_mame(model, min_tokens=40)
    inputs, block = unet_inputs(model), block_of(model)
    text = {"encoder_hidden_states": inputs["encoder_hidden_states"]}
    with torch.no_grad():
        model(**inputs)
        once = len(planned)
        call_alone(block, **text)
        assert len(planned) == once + 1
        hook = block.register_forward_hook(lambda *args: in_thread(lambda: call_alone(block.attn1)))
        model(**with_another_text(inputs))
        hook.remove()
        assert len(planned) == once + 2, (
            "a call beside the model's makes its own, the model's second none"
        )
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
    if end == "interruption":  # PyTorch tells no hook of it
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
def test_a_compiled_model_and_its_calls_stand_alone() -> None:
    torch._dynamo.reset()
    model = one_level_unet()
    guided = {**unet_inputs(model, batch=1), "timestep": torch.tensor(500)}
    unguided = with_another_text(guided)
    apply_mame(model, keep=0.25, min_tokens=1)
    alone = run({**unguided, "sample": guided["sample"].clone()}, model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    run(guided, compiled)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(run(unguided, compiled), alone)
    # Its own, and the small one of the hook that reads the step.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


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
    """The latents come in a list, as Z-Image has them; what comes as a tensor after it may be the
    same for many.
    """
    own = model.forward
    model.forward = lambda sample, timestep, encoder_hidden_states: own(
        sample[0], timestep, encoder_hidden_states
    )
    inputs["sample"] = [inputs["sample"]]


def captured(model: Any, inputs: dict[str, Any]) -> None:
    """As if a CUDA graph were being captured, which takes a GPU."""
    hooks._is_recorded = lambda t: True


def subclass(model: Any, inputs: dict[str, Any]) -> None:
    inputs["sample"] = inputs["sample"].as_subclass(nn.Buffer)


@pytest.mark.parametrize("case", [first_input_has_no_tensor, captured, subclass])
def test_nothing_is_kept_where_calls_can_not_be_told_apart(
    case: Any, planned: list[Groups], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Put back afterwards.
    monkeypatch.setattr(hooks, "_is_recorded", hooks._is_recorded)
    model = tiny_unet()
    apply_mame(model, min_tokens=40)
    inputs = {**unet_inputs(model), "timestep": torch.tensor(500)}
    case(model, inputs)
    with torch.no_grad():
        model(**inputs)
        once = len(planned)
        model(**with_another_text(inputs))
    assert len(planned) == 2 * once > 0
    assert not any(plan() is not None for plan in kept_for(planned))


@pytest.mark.parametrize(
    ("fields", "compared"), [({}, True), ({"tau": 0.2}, False), ({"min_tokens": 10000}, False)]
)
def test_timesteps_are_compared_where_plans_are_kept_alone(
    fields: dict[str, Any], compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that waits for it."""
    seen, equal = [], torch.equal

    def counted(*tensors: Tensor) -> bool:
        seen.append(tensors)
        return equal(*tensors)

    monkeypatch.setattr(torch, "equal", counted)
    model = tiny_unet()
    apply_mame(model, **{"min_tokens": 40, **fields})
    inputs = {**unet_inputs(model), "timestep": torch.tensor(500)}
    with torch.no_grad():
        model(**inputs)
        assert not seen
        model(**{**with_another_text(inputs), "timestep": torch.tensor(500)})
    assert len(seen) == compared


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
