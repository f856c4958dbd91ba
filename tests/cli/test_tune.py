"""Tuning: a (tiny) pipeline is calibrated, what was found is measured, resumed, chosen and written
as a config.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel
from PIL import Image

from mame_sd import mame
from mame_sd.cli import app as cli
from mame_sd.config import MaMeConfig
from mame_sd.diffusion.calibration import Calibration, Option
from mame_sd.diffusion.saved_setting import resolve_setting
from mame_sd.errors import UserError
from mame_sd.eval.tuning.calibrate import CALIBRATED, calibrate, settings_to_check
from mame_sd.eval.tuning.choice import choose, concrete, measured, remarks
from mame_sd.eval.tuning.measure import BASELINE, FLOOR, Trial, tune
from mame_sd.eval.tuning.table import table, text_plot
from mame_sd.pipelines import StableDiffusionMaMePipeline
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.loading import LoadedModel, load_model
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.prompt_files import Prompt, prompts_from_texts
from tests.builders.tiny import save_tiny_pipeline, seeded
from tests.builders.transformers import FLUX, flux_inputs, normal

SMALL = MaMeConfig(min_tokens=16)
PROMPTS = prompts_from_texts(["a red key", "an owl"])
ROWS = [
    ("mild", SMALL.replace(keep=0.75)),
    ("middle", SMALL.replace(keep=0.25)),
    ("strong", SMALL.replace(keep=0.0625)),
]
ONE_STEP = GenerateSettings(steps=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_pipeline(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(ModelChoice(model=str(folder), device="cpu"))


def distance(a: Image.Image, b: Image.Image) -> float:
    return float(np.abs(np.asarray(a, float) - np.asarray(b, float)).mean())


def test_every_setting_is_measured_and_a_second_call_measures_nothing(
    model: LoadedModel, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    trials = tune(model, PROMPTS, ONE_STEP, ROWS, distance, tmp_path, lambda *n: seen.append(n))
    assert [(t.label, t.config) for t in trials] == [(BASELINE, None), *ROWS, (FLOOR, None)]
    assert seen[-1] == (len(PROMPTS) * (2 + len(ROWS)),) * 2
    found = {t.label: t for t in trials}
    assert [found[label].kept for label, _ in ROWS] == [0.75, 0.25, 0.0625]
    assert 0 == found[BASELINE].lpips < found["mild"].lpips < found["strong"].lpips, (
        "keeping fewer keys costs more"
    )
    assert found[FLOOR].lpips > found["mild"].lpips
    low, high = found["mild"].interval or (0, 0)
    assert low <= found["mild"].lpips <= high

    def refuse(a: Image.Image, b: Image.Image) -> float:
        raise AssertionError("nothing is to be measured again")

    assert tune(model, PROMPTS, ONE_STEP, ROWS, refuse, tmp_path) == trials
    with pytest.raises(AssertionError, match="again"):  # other settings: measured anew
        tune(model, PROMPTS, GenerateSettings(steps=1, seed=1), ROWS, refuse, tmp_path)


def test_a_stopped_call_continues_with_the_prompt_it_was_in(
    model: LoadedModel, tmp_path: Path
) -> None:
    calls: list[int] = []

    def stop_in_the_second_prompt(a: Image.Image, b: Image.Image) -> float:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return 0.0

    for _ in range(2):
        try:
            tune(model, PROMPTS, ONE_STEP, ROWS[:1], stop_in_the_second_prompt, tmp_path)
        except KeyboardInterrupt:
            assert len(calls) == 5
    assert len(calls) == 3 + 2 + 3


def test_a_calibration_that_was_stopped_goes_on_with_the_next_prompt(
    model: LoadedModel, tmp_path: Path
) -> None:
    def stop(done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(model, PROMPTS, ONE_STEP, SMALL, tmp_path, stop)
    first = json.loads((tmp_path / CALIBRATED).read_text())["rows"]
    found = calibrate(model, PROMPTS, ONE_STEP, SMALL, tmp_path)
    assert json.loads((tmp_path / CALIBRATED).read_text())["rows"].items() > first.items()
    assert found.about["calibrated_on_prompts"] == 2
    assert (found.about["steps"], found.about["size"]) == (1, [32, 32])
    with pytest.raises(UserError, match="could merge, found none; lower min_tokens"):
        calibrate(model, PROMPTS, ONE_STEP, MaMeConfig(), tmp_path)


def test_what_is_checked_are_uniform_shares_and_settings_of_many_speeds() -> None:
    options = [
        Option(False, 0.0, 1.0),
        Option({"keep": 0.5}, 0.1, 0.6),
        Option({"keep": 0.25}, 0.3, 0.4),
    ]
    found = Calibration(SMALL, "a model", 3.0, {"one": options, "two": options})
    rows = settings_to_check(found, SMALL, None)
    assert rows[0] == ("default", SMALL)
    assert len({config for _, config in rows}) == len(rows), "none twice"
    speeds = [float(label.removeprefix("by layer, ")) for label, _ in rows[1:]]
    assert speeds == sorted(speeds)
    assert speeds[-1] <= found.fastest
    assert [label for label, _ in settings_to_check(found, SMALL, 1.2)][:2] == [
        "default",
        "by layer, 1.20",
    ]
    assert len(settings_to_check(found, SMALL, 9.0)) == 2, (
        "the fastest there is, for a wish beyond it"
    )


@pytest.mark.parametrize("layers", [3, 17, 38])
def test_the_fastest_there_is_can_be_checked_with_any_number_of_layers(layers: int) -> None:
    options = {
        f"layer {n}": [Option(False, 0.0, 1 / 3), Option({"keep": 0.5}, 0.1 + n, 1 / (7 + n))]
        for n in range(layers)
    }
    found = Calibration(SMALL, "a model", float(layers), options)
    for speed in (None, 1000.0):
        configs = [config for _, config in settings_to_check(found, SMALL, speed)]
        assert found.config(found.fastest * 0.999) in configs


def trial(
    label: str, times_faster: float, lpips: float, config: MaMeConfig | None = SMALL
) -> Trial:
    return Trial(
        label, config, 1.0, times_faster, lpips, 0.5, (lpips, lpips), (times_faster, times_faster)
    )


TRIALS = [
    trial(BASELINE, 1.0, 0.0, None),
    trial("mild", 1.1, 0.01),
    trial("middle", 1.3, 0.03),
    trial("strong", 1.6, 0.09),
    trial("slow", 0.9, 0.001),
    trial(FLOOR, 1.2, 0.3, None),
]


def test_the_choice_is_the_fastest_within_the_distance_or_the_nearest_within_the_speed() -> None:
    assert choose(TRIALS, 0.05, None).label == "middle"
    assert choose(TRIALS, None, 1.2).label == "middle"
    assert choose(TRIALS, None, 1.5).label == "strong"
    with pytest.raises(UserError, match=r"at most 0.005 .*nearest is mild: LPIPS 0.0100"):
        choose(TRIALS, 0.005, None)
    with pytest.raises(UserError, match=r"at least 2 times the speed, the nearest is strong"):
        choose(TRIALS, None, 2.0)
    with pytest.raises(UserError, match=r"got an LPIPS of .0000 in every row"):
        choose([trial("one", 1.5, 0.0), trial("two", 1.2, 0.00004), TRIALS[-1]], 0.05, None)
    with pytest.raises(
        UserError,
        match=r"faster than no merging, got none: the fastest, slow, is 0.90 .*leave merging off",
    ):
        choose([TRIALS[0], TRIALS[4], TRIALS[-1]], 0.05, None)
    told = measured(TRIALS, TRIALS[2])
    assert told["chosen"] == {"times_faster": 1.3, "lpips": 0.03, "lpips_interval": [0.03, 0.03]}
    assert told["uniform"]["times_faster"] == 1.1


def test_remarks_say_what_the_choice_rests_on() -> None:
    (told,) = remarks(TRIALS, TRIALS[2])
    assert (
        told
        == "without any attention (mean attention) LPIPS is 0.3000: these prompts can tell settings"
        " apart"
    )
    blind = [*TRIALS[:-1], trial(FLOOR, 1.2, 0.02, None)]
    assert "hardly tell settings apart" in remarks(blind, TRIALS[2])[0]
    alone = Trial("alone", SMALL, 1.0, 1.1, 0.01, 0.5, None, (0.8, 1.4))
    assert [text.split(";")[0] for text in remarks(TRIALS, alone)[1:]] == [
        "one prompt gives no interval",
        "times spread by 0.60, more than is gained",
    ]


def test_table_and_plot_show_every_setting() -> None:
    lines = table(TRIALS, TRIALS[2]).splitlines()
    assert [line[:2] for line in lines[1:]] == ["  ", "  ", "->", "  ", "  ", "  "]
    assert "0.0300 (0.0300 - 0.0300)" in lines[3]
    plot = text_plot(TRIALS)
    assert all(str(number) in plot.split("\n", 1)[1] for number in (1, 2, 3, 4))
    assert text_plot(TRIALS[:1]), "one point has no extent"


def test_the_command_writes_a_config_that_generate_takes(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "mame_sd.eval.tuning.measure.lpips_distance", lambda weights_dir, offline: distance
    )
    # a model so small gains no time: what it takes is given, as if measured on a larger one
    monkeypatch.setattr("mame_sd.eval.tuning.measure._trial", with_speed)
    command = [
        "tune",
        "--model",
        str(folder),
        "--prompt",
        "a red key",
        "--prompt",
        "an owl",
        "--steps",
        "1",
    ]
    command += ["--min-tokens", "16", "--size", "32"]
    assert cli.run([*command, "--speed", "1.01", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "config.json").read_text())
    about = written.pop("about")
    assert about["wish"] == {"speed": 1.01}
    assert about["model"]["name"] == "tiny"
    assert (about["steps"], about["size"], about["checked_on_prompts"]) == (1, [32, 32], 1)
    assert {"chosen", "uniform"} == set(about["measured"])
    config = MaMeConfig.from_file(tmp_path / "config.json")
    assert config.min_tokens == 16
    assert written["tile_size"] == config.tile_size, (
        "written whole: a later version's defaults change nothing"
    )
    assert MaMeConfig.from_dict(written) == config
    out = capsys.readouterr()
    assert "->" in out.out
    assert "mean attention" in out.out
    assert "no interval" in out.err
    generate = ["generate", "--model", str(folder), "--prompt", "key", "--steps", "1", "--config"]
    assert cli.run([*generate, str(tmp_path / "config.json"), "--out", str(tmp_path / "run")]) == 0
    assert cli.run([*command, "--speed", "1000", "--out", str(tmp_path)]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("error: expected a setting with at least 1000 times")
    )
    merging = StableDiffusionMaMePipeline.from_pretrained(folder, mame_config={"min_tokens": 16})
    merging.save_pretrained(tmp_path / "saved")
    command[2] = str(
        tmp_path / "saved"
    )  # its own min_tokens holds: with the default's nothing could merge here
    del command[command.index("--min-tokens") : command.index("--min-tokens") + 2]
    assert cli.run([*command, "--speed", "1.01", "--out", str(tmp_path / "tuned")]) == 0
    assert MaMeConfig.from_file(tmp_path / "tuned" / "config.json").min_tokens == 16


def with_speed(
    label: str, config: MaMeConfig | None, rows: dict[str, dict[str, dict[str, float]]]
) -> Trial:
    lpips = float(np.mean([row[label]["lpips"] for row in rows.values()]))
    return Trial(label, config, 1.0, 1.0 if config is None else 1.3, lpips, 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "expected one of --max-lpips or --speed, got neither"),
        (["--speed", "1.2", "--max-lpips", "0.1"], "got both"),
        (["--max-lpips", "nan"], "--max-lpips: expected a number above 0, got nan"),
        (["--max-lpips", "0"], "--max-lpips: expected a number above 0"),
        (["--speed", "1"], "--speed: expected a number above 1, got 1.0"),
        (["--speed", "nan"], "--speed: expected a number above 1, got nan"),
        (["--speed", "1.2", "--metric", "dot"], "No such option: --metric"),
        (["--speed", "1.2", "--num", "0"], "--num: expected at least 1, got 0"),
    ],
    ids=str,
)
def test_a_bad_wish_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert (
        cli.run(["tune", "--model", str(tmp_path / "none"), *options, "--out", str(tmp_path)]) == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_tuned_file_merges_transformers_as_tuning_did() -> None:
    model = seeded(FluxTransformer2DModel, 0, **FLUX, pooled_projection_dim=8)
    inputs = {
        **flux_inputs(),
        "pooled_projections": normal(2, 8),
        "timestep": torch.tensor([0.5, 0.5]),
    }
    for label, config in ROWS:
        with mame(model, MaMeConfig.from_dict(json.loads(json.dumps(concrete(config))))) as handle:
            model(**inputs)
            assert handle.report().layers[0].merged, label
    assert (
        resolve_setting(0.8, None, {n: v for n, v in concrete(SMALL).items() if n != "keep"})
        is not None
    )


def test_a_prompt_of_another_size_is_measured_anew(model: LoadedModel, tmp_path: Path) -> None:
    calls: list[int] = []

    def count(a: Image.Image, b: Image.Image) -> float:
        calls.append(1)
        return 0.0

    for side in (32, 40):
        prompt = Prompt(id="a", text="key", width=side, height=side)
        tune(model, [prompt], ONE_STEP, ROWS[:1], count, tmp_path)
    assert len(calls) == 6  # baseline, one setting and the floor, twice
