"""Tuning: every setting is measured on a real (tiny) pipeline, resumed, chosen and written as a config."""

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
from mame_sd.diffusion.saved_setting import resolve_setting
from mame_sd.errors import UserError
from mame_sd.eval.tuning.choice import choose, whole
from mame_sd.eval.tuning.ladder import LADDER, ladder_of
from mame_sd.eval.tuning.measure import Trial, tune
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_pipeline(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(ModelChoice(model=str(folder), device="cpu"))


def distance(a: Image.Image, b: Image.Image) -> float:
    return float(np.abs(np.asarray(a, float) - np.asarray(b, float)).mean())


def test_every_step_of_the_ladder_is_measured_and_a_second_call_measures_nothing(
    model: LoadedModel, tmp_path: Path
) -> None:
    ladder = ladder_of(SMALL)
    seen: list[tuple[int, int]] = []
    trials = tune(model, PROMPTS, GenerateSettings(steps=1), ladder, distance, tmp_path, lambda *n: seen.append(n))
    assert [t.config for t in trials] == [SMALL.replace(**fields) for fields in LADDER]
    assert [c for _, c in ladder_of(SMALL.replace(stride=(2, 2)))] == [t.config for t in trials]
    assert seen[-1] == (len(PROMPTS) * (1 + len(LADDER)),) * 2
    kept = {t.label: t.kept for t in trials}
    assert kept["keep 0.75"] == 0.75
    assert kept["keep 0.25"] == 0.25 > kept["keep 0.0625"]
    assert trials[0].lpips < trials[6].lpips, "keeping fewer keys costs more"

    def refuse(a: Image.Image, b: Image.Image) -> float:
        raise AssertionError("nothing is to be measured again")

    assert tune(model, PROMPTS, GenerateSettings(steps=1), ladder, refuse, tmp_path) == trials
    with pytest.raises(AssertionError, match="again"):  # other settings: measured anew
        tune(model, PROMPTS, GenerateSettings(steps=1, seed=1), ladder, refuse, tmp_path)


def test_a_stopped_call_continues_with_the_prompt_it_was_in(model: LoadedModel, tmp_path: Path) -> None:
    ladder, calls = ladder_of(SMALL)[:2], []

    def stop_in_the_second_prompt(a: Image.Image, b: Image.Image) -> float:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        tune(model, PROMPTS, GenerateSettings(steps=1), ladder, stop_in_the_second_prompt, tmp_path)
    tune(model, PROMPTS, GenerateSettings(steps=1), ladder, stop_in_the_second_prompt, tmp_path)
    assert len(calls) == 3 + 2 + 3


def trial(label: str, times_faster: float, lpips: float) -> Trial:
    return Trial(label, SMALL, 1.0, times_faster, lpips, 0.5)


TRIALS = [trial("mild", 1.1, 0.01), trial("middle", 1.3, 0.03), trial("strong", 1.6, 0.09), trial("slow", 0.9, 0.001)]


def test_the_choice_is_the_fastest_within_the_distance_or_the_nearest_within_the_speed() -> None:
    assert choose(TRIALS, 0.05, None).label == "middle"
    assert choose(TRIALS, None, 1.2).label == "middle"
    assert choose(TRIALS, None, 1.5).label == "strong"
    with pytest.raises(UserError, match=r"at most 0.005 .*nearest is slow: LPIPS 0.0010"):
        choose(TRIALS, 0.005, None)
    with pytest.raises(UserError, match=r"at least 2 times the speed, the nearest is strong"):
        choose(TRIALS, None, 2.0)


def test_table_and_plot_show_every_setting() -> None:
    lines = table(TRIALS, TRIALS[1]).splitlines()
    assert [line[:2] for line in lines[1:]] == ["  ", "->", "  ", "  "]
    plot = text_plot(TRIALS)
    assert all(str(number) in plot.split("\n", 1)[1] for number in (1, 2, 3, 4))
    assert text_plot(TRIALS[:1]), "one point has no extent"


def test_the_command_writes_a_config_that_generate_takes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mame_sd.eval.tuning.measure.lpips_distance", lambda weights_dir, offline: distance)
    command = [
        "tune",
        "--model",
        str(folder),
        "--prompt",
        "a red key",
        "--steps",
        "1",
        "--min-tokens",
        "16",
        "--size",
        "32",
    ]
    assert cli.run([*command, "--min-speedup", "0.01", "--out", str(tmp_path)]) == 0
    config = MaMeConfig.from_file(tmp_path / "config.json")
    assert config.min_tokens == 16
    assert config.keep is not None
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["weights"] == config.weights, "written whole: a later version's defaults change nothing"
    assert MaMeConfig.from_dict(written) == config
    assert resolve_setting(0.8, None, {name: v for name, v in written.items() if name != "keep"}) is not None
    assert "->" in capsys.readouterr().out
    assert cli.run([*command, "--min-speedup", "0.01", "--mame-variant", "paper", "--out", str(tmp_path)]) == 2
    assert "merging: variant: 'paper' knows only tau" in capsys.readouterr().err
    assert cli.run([*command, "--min-speedup", "1000", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: expected a setting with at least 1000 times")
    assert cli.run([*command, "--out", str(tmp_path)]) == 2
    assert "--max-lpips or --min-speedup" in capsys.readouterr().err
    merging = StableDiffusionMaMePipeline.from_pretrained(folder, mame_config={"min_tokens": 16})
    merging.save_pretrained(tmp_path / "saved")
    command[2] = str(tmp_path / "saved")  # its own min_tokens holds: with the default's nothing could merge here
    del command[command.index("--min-tokens") : command.index("--min-tokens") + 2]
    assert cli.run([*command, "--min-speedup", "0.01", "--out", str(tmp_path / "tuned")]) == 0
    assert MaMeConfig.from_file(tmp_path / "tuned" / "config.json").min_tokens == 16
    for prompts in ([], command[3:5]):  # without --prompt, those of the demo
        assert cli.run(["tune", *prompts, "--num", "0", "--min-speedup", "1", "--out", str(tmp_path)]) == 2
        assert "--num: expected at least 1, got 0" in capsys.readouterr().err


def test_a_tuned_file_merges_transformers_as_tuning_did() -> None:
    model = seeded(FluxTransformer2DModel, 0, **FLUX, pooled_projection_dim=8)
    inputs = {**flux_inputs(), "pooled_projections": normal(2, 8), "timestep": torch.tensor([0.5, 0.5])}
    for label, config in ladder_of(MaMeConfig(min_tokens=16)):
        with mame(model, MaMeConfig.from_dict(json.loads(json.dumps(whole(config))))) as handle:
            model(**inputs)
            assert handle.report().layers[0].merged, label


def test_the_ladder_says_what_it_does_whatever_it_starts_from() -> None:
    assert [c.merge for _, c in ladder_of(MaMeConfig(keep=0.5, merge="qkv"))] == ["kv"] * 7 + ["qkv"] * 3


def test_a_prompt_of_another_size_is_measured_anew(model: LoadedModel, tmp_path: Path) -> None:
    calls: list[int] = []

    def count(a: Image.Image, b: Image.Image) -> float:
        calls.append(1)
        return 0.0

    for side in (32, 40):
        tune(
            model,
            [Prompt(id="a", text="key", width=side, height=side)],
            GenerateSettings(steps=1),
            ladder_of(SMALL)[:1],
            count,
            tmp_path,
        )
    assert len(calls) == 4  # baseline and one setting, twice
