"""Test calibration: its errors are those of merged outputs, and its choice is near the best."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from mame_sd import MaMeConfig, apply_mame
from mame_sd.diffusion import calibration as cal
from mame_sd.diffusion.calibration import (
    FORMS,
    Calibration,
    Measurement,
    Option,
    choose,
    measure,
    recorded,
)
from tests.builders.pipelines import sd
from tests.builders.tiny import (
    generate,
    one_level_unet,
    run_unet,
    tiny_pipeline,
    tiny_unet,
    unet_inputs,
)

SMALL: dict[str, Any] = {"min_tokens": 16}


class Work(TorchFunctionMode):
    """Count products of attention and linear layers, as a clock that depends on shapes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.done += args[0].numel() * args[1].shape[-2] * 1e-9
        elif func is F.linear:
            self.done += args[0].numel() * len(args[1]) * 1e-9
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[Callable[[], float]]:
    with Work() as work:
        yield lambda: work.done


def some_options(rng: np.random.Generator, layers: int) -> dict[int, list[Option]]:
    """Return options of layers that differ in seconds and in the weight of their errors."""
    found = {}
    for layer, whole in enumerate(rng.dirichlet(np.ones(layers))):
        weight = 10 ** rng.uniform(-3, 0)
        found[layer] = [Option(False, 0.0, whole)] + [
            Option({"keep": keep}, weight * (1 - keep) * rng.uniform(0.8, 1.2), whole * keep)
            for keep in (0.5, 0.25, 0.125)
        ]
    return found


def saved_by(options: dict[int, list[Option]], chosen: Any) -> float:
    return float(
        sum(found[0].seconds - o.seconds for found, o in zip(options.values(), chosen, strict=True))
    )


def test_the_choice_saves_what_is_asked_for_and_is_near_the_best_of_all() -> None:
    over = []
    for seed in range(4):
        options = some_options(np.random.default_rng(seed), 5)
        every = [
            (saved_by(options, picked), sum(o.error for o in picked))
            for picked in itertools.product(*options.values())
        ]
        most = max(saved for saved, _ in every)
        for share in (0.1, 0.4, 0.7, 0.95, 1.0):
            chosen = choose(options, share * most)
            assert chosen is not None
            assert saved_by(options, chosen.values()) >= share * most - 1e-9
            best = min(error for saved, error in every if saved >= share * most - 1e-12)
            over.append(sum(o.error for o in chosen.values()) / best)
        assert choose(options, 1.01 * most) is None
        assert choose(options, 0.0) == {name: found[0] for name, found in options.items()}
    assert np.median(over) < 1.1
    assert max(over) < 2, over


@pytest.mark.parametrize("layers", [1, 24])
def test_all_that_merging_can_save_can_be_asked_for(layers: int) -> None:
    options = some_options(np.random.default_rng(layers), layers)
    fastest = [min(found, key=lambda o: o.seconds) for found in options.values()]
    most = saved_by(options, fastest)
    for left in (0.0, 1e-9, 1e-3):
        chosen = choose(options, most * (1 - left))
        assert chosen is not None
        assert saved_by(options, chosen.values()) >= most * (1 - left) - 1e-9
        assert sum(o.error for o in chosen.values()) <= sum(o.error for o in fastest)
    named = {str(n): o for n, o in options.items()}
    found = Calibration(MaMeConfig(**SMALL), "a model", 2.0, named)
    for speed in (found.fastest, found.fastest * 0.999):
        assert found.config(speed).calibrated_for == "a model"
    with pytest.raises(ValueError, match=r"speed: expected at most .*, got 99; ask for less"):
        found.config(99)
    slower = {"layer": [Option(False, 0.0, 1.0), Option({"keep": 0.5, "fit_queries": 0}, 0.1, 1.1)]}
    found = Calibration(MaMeConfig(**SMALL), "a model", 2.0, slower)
    with pytest.raises(ValueError, match=r"speed: expected at most 1\.00, .*, or give larger"):
        found.config(1.01)


def test_errors_are_those_of_each_blocks_own_output(monkeypatch: pytest.MonkeyPatch) -> None:
    unet = tiny_unet()
    handle = apply_mame(unet, **SMALL)
    before = run_unet(unet)
    inputs = unet_inputs(unet)
    with counting() as clock:
        monkeypatch.setattr(cal, "clock_of", lambda device: clock)
        found = Measurement()
        measure(handle, lambda: unet(**inputs), found)
    assert not any(layer.calls for layer in handle.report().layers), "nothing is counted"
    assert torch.equal(run_unet(unet), before), "every hook is where it was"
    blocks = {hook.stats.name for _, hook in handle.restored if hook.stats.kind == "block"}
    assert set(found.blocks) <= blocks
    name = next(reversed(found.blocks))
    rows = {row[0]: row for row in found.blocks[name]}
    assert rows.keys() == set(range(len(FORMS))), "all forms act in a UNet's block"
    module, outputs = unet.get_submodule(name), []
    module.register_forward_hook(lambda _, args, output: outputs.append(output))

    def apart(pair: list[torch.Tensor]) -> float:
        unmerged, merged = (t.double() for t in pair)
        return float((merged - unmerged).square().sum() / unmerged.square().sum())

    effect, own = found.effects[name][0]
    median = next(number for number, row in rows.items() if row[2] == own)
    for number in (1, median, len(FORMS) - 1):
        outputs.clear()
        made = []
        for rule in (False, FORMS[number]):
            with apply_mame(unet, **SMALL, layers={**dict.fromkeys(blocks, False), name: rule}):
                made.append(run_unet(unet))
        assert rows[number][2] == pytest.approx(apart(outputs), rel=1e-3)
        if number == median:
            assert effect == pytest.approx(apart(made), rel=1e-3), "of the model's output"
            option = next(o for o in cal.options(found)[name] if o.rule == FORMS[number])
            weight = 1 if option.rule["block_keep"] == 1 else cal.BLOCK_WEIGHT
            assert option.error == pytest.approx(weight * apart(made), rel=1e-3), "what counts"
    share = [rows[number][1] / rows[0][1] for number in range(len(FORMS))]
    quarter, eighth = ({**cal.ALL, of: n} for of, n in (("keep", 0.25), ("mlp_keep", 0.125)))
    both = FORMS.index({**quarter, "mlp_keep": 0.125})
    assert share[both] < min(share[FORMS.index(quarter)], share[FORMS.index(eighth)]) < 1
    assert 0.5 < share[FORMS.index({**cal.ALL, "block_keep": 0.5})] < 0.8, "keys are computed"


@pytest.mark.parametrize("left_out", [["block_keep"], ["mlp_keep", "block_keep"]], ids=str)
def test_what_the_settings_set_to_one_is_left_out(left_out: list[str]) -> None:
    unet = one_level_unet()
    handle = apply_mame(unet, **SMALL, **dict.fromkeys(left_out, 1.0))
    inputs = unet_inputs(unet)
    found = Measurement()
    measure(handle, lambda: unet(**inputs), found)
    forms = {number for rows in found.blocks.values() for number, *_ in rows}
    measured = [FORMS[number] for number in forms]
    smallest = {of: min(form[of] for form in measured) for of in cal.ALL}
    assert {of for of, share in smallest.items() if share == 1} == set(left_out)


def test_a_call_is_kept_as_it_was() -> None:
    unet = tiny_unet()
    inputs = unet_inputs(unet)
    sample = inputs["sample"].clone()
    with recorded(unet) as calls, torch.no_grad():
        unet(**inputs)
        inputs["sample"] += 1
        unet(**inputs)
    first, second = (call.keywords["sample"] for call in calls)
    assert torch.equal(first, sample)
    assert torch.equal(second, sample + 1)


def test_a_pipeline_is_calibrated_and_its_file_gives_the_same_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = sd("StableDiffusionPipeline", unet=one_level_unet())
    handle = apply_mame(pipe, **SMALL)
    with counting() as clock:
        monkeypatch.setattr(cal, "clock_of", lambda device: clock)
        found = handle.calibrate(["a red key", "an owl"], speed=1.2, num_inference_steps=3)
        assert handle.config.calibrated_for == handle.described
        assert handle.config == found.config(1.2)
        with pytest.raises(ValueError, match=r"speed: expected at most \d\.\d\d, .* got 99"):
            handle.calibrate(["an owl"], speed=99.0, num_inference_steps=1)
        assert handle.config == found.config(1.2)
    assert found.fastest > 1.2
    assert "estimated 1.2" in found.table(1.2)
    expected = generate(pipe)
    shares = [layer.share for layer in handle.report().layers]
    assert min(shares) < max(shares), "layers differ"
    file = tmp_path / "settings.json"
    found.save(file, speed=1.2)
    about = json.loads(file.read_text())["about"]
    expected_about = {"speed": 1.2, "prompts": 2, "num_inference_steps": 3, "device": "cpu"}
    assert expected_about.items() <= about.items()
    handle.remove()
    apply_mame(pipe, file)
    assert torch.equal(generate(pipe), expected)


def test_what_can_not_be_calibrated_is_refused_before_anything_runs() -> None:
    pipe = tiny_pipeline()
    handle = apply_mame(pipe, **SMALL)
    wishes: list[tuple[list[str], Any, str]] = [
        (["a"], 1, "speed: expected a number above 1, got 1"),
        (["a"], "fast", "speed: expected a number above 1, got 'fast'"),
        ([], 1.2, "expected a pipeline and a few prompts, got no prompts"),
    ]
    for prompts, speed, message in wishes:
        with pytest.raises(ValueError, match=message):
            handle.calibrate(prompts, speed=speed)
    assert handle.config == MaMeConfig(**SMALL)


def test_models_by_themselves_and_those_too_small_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="got a UNet2DConditionModel by itself; see apply_mame"):
        apply_mame(tiny_unet(), **SMALL).calibrate(["a"], speed=1.2)
    pipe = tiny_pipeline()
    with pytest.raises(ValueError, match="could merge, found none; lower min_tokens"):
        apply_mame(pipe).calibrate(["a"], speed=1.2, num_inference_steps=1)
    with pytest.raises(ValueError, match=r"expected no tau, .*, got tau=0\.5; set keep first"):
        apply_mame(pipe, tau=0.5).calibrate(["a"], speed=1.2)
    handle = apply_mame(pipe)
    del pipe
    with pytest.raises(ValueError, match="got a pipeline that nothing else holds"):
        handle.calibrate(["a"], speed=1.2)
