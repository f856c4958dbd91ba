"""Calibration: errors are those of the merged outputs, the choice is the best there is, and it
comes back from a file.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import StableDiffusionPipeline
from torch.overrides import TorchFunctionMode

from mame_sd import MaMeConfig, apply_mame, mame
from mame_sd.diffusion import calibration as cal
from mame_sd.diffusion.calibration import (
    FORMS,
    GRID,
    Measurement,
    Option,
    choose,
    measure,
    recorded,
)
from tests.builders.tiny import (
    generate,
    one_level_unet,
    run_unet,
    tiny_components,
    tiny_pipeline,
    tiny_unet,
    unet_inputs,
)

SMALL: dict[str, Any] = {"min_tokens": 16}


class Work(TorchFunctionMode):
    """Counts what attention multiplies, as a clock whose seconds depend on nothing but shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.done += args[0].numel() * args[1].shape[-2] * 1e-9
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[Callable[[], float]]:
    with Work() as work:
        yield lambda: work.done


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    options = {}
    for layer in range(4):
        found = [Option(False, 0.0, 1.0)]
        found += [
            Option({"keep": k}, float(e), float(s))
            for k, (e, s) in enumerate(rng.uniform(0, 1, (4, 2)))
        ]
        options[f"layer {layer}"] = found
    combinations = [
        (sum(1 - o.seconds for o in picked), sum(o.error for o in picked))
        for picked in itertools.product(*options.values())
    ]
    most = max(saved for saved, _ in combinations)
    for share in (0.1, 0.4, 0.7, 0.95):
        chosen = choose(options, share * most)
        assert chosen is not None
        assert sum(1 - o.seconds for o in chosen.values()) >= share * most, (
            "what is asked for is saved"
        )
        slack = len(options) * most / GRID
        best = min(error for saved, error in combinations if saved >= share * most + slack)
        assert sum(o.error for o in chosen.values()) <= best + 1e-12
    assert choose(options, 1.01 * most) is None
    assert choose(options, 0.0) == {name: found[0] for name, found in options.items()}


@pytest.mark.parametrize("layers", [1, 7, 24, 57])
@pytest.mark.parametrize("left", [0.0, 1e-9, 1e-3])
def test_all_that_merging_can_save_can_be_asked_for(layers: int, left: float) -> None:
    """Though a grid of seconds rounds each layer's down."""
    rng = np.random.default_rng(layers)
    for _ in range(10):
        options = {
            layer: [
                Option(False, 0.0, seconds),
                *(
                    Option({"keep": 0.5}, float(rng.random()), seconds * rng.uniform(0.1, 0.9))
                    for _ in range(4)
                ),
            ]
            for layer, seconds in enumerate(rng.dirichlet(np.ones(layers)))
        }
        most = sum(found[0].seconds - min(o.seconds for o in found) for found in options.values())
        chosen = choose(options, most * (1 - left))
        assert chosen is not None
        saved = sum(options[layer][0].seconds - chosen[layer].seconds for layer in options)
        assert saved >= most * (1 - left) - 1e-9
        fastest = [min(found, key=lambda o: o.seconds) for found in options.values()]
        assert sum(o.error for o in chosen.values()) <= sum(o.error for o in fastest)


def test_near_the_fastest_choice_seconds_left_go_where_they_take_most_error() -> None:
    options = {
        name: [
            Option(False, 0.0, whole),
            Option({"keep": 0.5}, 0.1, 0.2 + 1e-6),
            Option({"keep": 0.25}, error, 0.2),
        ]
        for name, whole, error in (("a", 1.0, 0.9), ("b", 0.7, 0.5))
    }
    chosen = choose(options, 1.3 - 1.5e-6)
    assert chosen is not None
    assert [o.rule for o in chosen.values()] == [{"keep": 0.5}, {"keep": 0.25}]


def test_errors_are_those_of_the_layers_own_merged_outputs() -> None:
    unet = tiny_unet()
    handle = apply_mame(unet, **SMALL)
    before = run_unet(unet)
    inputs = unet_inputs(unet)
    with counting() as clock:
        found = measure(handle, [((), inputs)], clock)
    assert torch.equal(run_unet(unet), before), "every hook is where it was"
    assert Measurement.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    names = {layer.name for layer in handle.report().layers}
    assert set(found.layers) <= names
    name = next(reversed(found.layers))
    module, outputs = unet.get_submodule(name), []
    module.register_forward_hook(lambda _, args, output: outputs.append(output))

    def apart(pair: list[torch.Tensor]) -> float:
        whole, merged = (t.double() for t in pair)
        return float((merged - whole).square().sum() / whole.square().sum())

    reference = FORMS.index(cal.REFERENCE)
    for number in (1, reference):
        outputs.clear()
        made = []
        for rule in (False, FORMS[number]):
            with mame(unet, **SMALL, layers={**dict.fromkeys(names, False), name: rule}):
                made.append(run_unet(unet))
        assert found.layers[name].errors[number] == [pytest.approx(apart(outputs), rel=1e-4)]
    assert found.layers[name].effect == [pytest.approx(apart(made), rel=1e-4)], (
        "of the model's output"
    )
    option = next(o for o in cal.options(found)[name] if o.rule == cal.REFERENCE)
    assert option.error == pytest.approx(apart(made), rel=1e-4), (
        "what counts is what the model's output loses"
    )
    # what the fit's queries attend to is work too
    tokens = next(layer.tokens_in for layer in handle.report().layers if layer.name == name)
    shares = [
        form["keep"] + min(form["fit_queries"], tokens) / tokens for form in map(dict, FORMS[:6])
    ]
    assert [
        found.layers[name].seconds[n][0] / found.layers[name].unmerged[0] for n in range(6)
    ] == pytest.approx(shares, abs=0.07)


def test_a_call_is_kept_as_it_was() -> None:
    unet = tiny_unet()
    inputs = unet_inputs(unet)
    sample = inputs["sample"].clone()
    with recorded(unet) as calls, torch.no_grad():
        unet(**inputs)
        inputs["sample"] += 1
        unet(**inputs)
    assert torch.equal(calls[0][1]["sample"], sample)
    assert torch.equal(calls[1][1]["sample"], sample + 1)
    text = [kwargs["encoder_hidden_states"] for _, kwargs in calls]
    assert text[0] is text[1], "what does not change is kept once"
    assert len(cal.some(calls * 5)) == len(cal.AT)


def test_a_pipeline_is_calibrated_and_its_file_gives_the_same_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tiny_pipeline()
    handle = apply_mame(pipe, **SMALL)
    with counting() as clock:
        monkeypatch.setattr(cal, "clock_of", lambda device: clock)
        found = handle.calibrate(["a red key", "an owl"], speed=1.2, num_inference_steps=3)
        assert handle.config.made_for == handle.described
        assert handle.config == found.config(1.2)
        with pytest.raises(ValueError, match=r"speed: expected at most \d\.\d\d, .* got 99"):
            handle.calibrate(["an owl"], speed=99.0, num_inference_steps=1)
        assert handle.config == found.config(1.2)
    assert found.fastest > 1.2
    assert "reckoned 1.2" in found.table(1.2)
    expected = generate(pipe)
    report = {layer.name: layer.share for layer in handle.report().layers}
    assert min(report.values()) < max(report.values()), "layers differ"
    file = tmp_path / "settings.json"
    found.save(file, speed=1.2)
    about = json.loads(file.read_text())["about"]
    assert (about["speed"], about["prompts"], about["num_inference_steps"], about["device"]) == (
        1.2,
        2,
        3,
        "cpu",
    )
    handle.remove()
    apply_mame(pipe, file)
    assert torch.equal(generate(pipe), expected)


@pytest.mark.parametrize("allowed", [1, 200])
def test_a_calibration_takes_few_forwards(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    monkeypatch.setattr(cal, "FORWARDS", allowed)
    pipe = StableDiffusionPipeline(**{**tiny_components(), "unet": one_level_unet()})
    pipe.set_progress_bar_config(disable=True)
    handle = apply_mame(pipe, **SMALL)
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    pipe.unet.register_forward_hook(count)
    images, steps, at = 2, 4, len(cal.AT)
    found = Measurement()
    for number in range(images):
        run = partial(generate, pipe, num_inference_steps=steps)
        found.add(cal.measure_image(handle, run, number, images))
    layers, calls = len(found.layers), images * at
    each = {len(layer.effect) for layer in found.layers.values()}
    assert each == {len(layer.own) for layer in found.layers.values()}
    assert len(each) == 1
    assert min(each) >= 2
    rest = images * steps + 2 * calls + images
    assert forwards == rest + layers * each.pop()
    assert forwards <= max(allowed, rest + 2 * layers), "two for each layer at least"
    if allowed == 200:
        assert all(len(layer.effect) == calls for layer in found.layers.values())


@pytest.mark.parametrize(
    ("prompts", "speed", "message"),
    [
        (["a"], 1, "speed: expected a number above 1, got 1"),
        (["a"], float("nan"), "speed: expected a number above 1, got nan"),
        (["a"], "fast", "speed: expected a number above 1, got 'fast'"),
        ([], 1.2, "expected a pipeline and a few prompts, got no prompts"),
    ],
)
def test_what_can_not_be_calibrated_is_refused_before_anything_runs(
    prompts: Any, speed: Any, message: str
) -> None:
    handle = apply_mame(tiny_pipeline(), **SMALL)
    with pytest.raises(ValueError, match=message):
        handle.calibrate(prompts, speed=speed)
    assert handle.config == MaMeConfig(**SMALL)


def test_models_by_themselves_and_those_too_small_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="got a UNet2DConditionModel by itself; see apply_mame"):
        apply_mame(tiny_unet(), **SMALL).calibrate(["a"], speed=1.2)
    with pytest.raises(ValueError, match="could merge, found none; lower min_tokens"):
        apply_mame(tiny_pipeline()).calibrate(["a"], speed=1.2, num_inference_steps=1)
