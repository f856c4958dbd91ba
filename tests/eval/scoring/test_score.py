"""Scores of two runs: what they are, and what they refuse."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mame_sd.errors import UserError
from mame_sd.eval.cli import app as cli
from mame_sd.eval.metric_list import METRICS, chosen_metrics
from mame_sd.eval.networks.extractors import Features
from mame_sd.eval.scoring.runs import Run
from mame_sd.eval.scoring.score import mean_value
from mame_sd.eval.scoring.sets import set_value
from mame_sd.eval.scoring.tools import Tools
from tests.builders.console import error_of
from tests.builders.metrics import noise
from tests.builders.run_folders import write_run
from tests.builders.tiny import save_tiny_clip


def shifted(pixels: np.ndarray, by: int) -> np.ndarray:
    return np.clip(pixels.astype(int) + by, 0, 255).astype(np.uint8)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    """Write five images, and the same ones changed a little, each by another amount."""
    a = {f"{i:02}_0": noise(i) for i in range(5)}
    b = {key: shifted(pixels, n + 1) for n, (key, pixels) in enumerate(a.items())}
    write_run(tmp_path / "a", a, torch="1")
    write_run(tmp_path / "b", b, torch="2", mame={"tau": 0.8})
    return str(tmp_path / "a"), str(tmp_path / "b")


def score_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    """Return what goes to stdout, and to stderr."""
    assert cli.run(["score", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")), err


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run(["score", *arguments]) == 2
    return error_of(capsys, silent=True)


def test_psnr_is_the_mean_of_per_image_values(
    runs: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    found, err = score_json(capsys, *runs, "--metrics", "psnr,ssim,is")
    expected = []
    for key in Run.open(Path(runs[0])).items:
        one, other = (
            np.asarray(Image.open(f"{run}/images/{key}.png"), np.float64) / 255 for run in runs
        )
        expected.append(-10 * math.log10(((one - other) ** 2).mean()))
    value = found["metrics"]["psnr"]
    assert value["mean"] == pytest.approx(np.mean(expected), abs=1e-4)
    assert min(expected) < value["low"] < value["mean"] < value["high"] < max(expected)
    assert value["n"] == 5
    assert list(found["metrics"]) == ["psnr", "ssim", "is"]
    assert found["metrics"]["is"]["withheld"] == "N = 5, needs 100"
    assert 'images differ a little for that alone (torch: "1" there, "2" here)' in err
    manifest = found["manifest"]
    assert manifest["run_b"]["settings"]["mame"] == {"tau": 0.8}
    assert manifest["networks"] == {}, "withheld metrics load nothing"
    assert manifest["versions"]["torch"] == version("torch")
    assert [metric.name for metric in chosen_metrics("ssim, psnr,ssim")] == ["ssim", "psnr"]


def test_plain_folders_of_images_pair_by_file_name(
    runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another program's images: no manifest, no prompts, endings that differ."""
    folders = [tmp_path / "plain a", tmp_path / "plain b"]
    for run, folder, ending in zip(runs, folders, (".png", ".bmp"), strict=True):
        folder.mkdir()
        for path in Path(run, "images").iterdir():
            Image.open(path).save(folder / f"{path.stem}{ending}")
    a, b = map(str, folders)
    expected = score_json(capsys, *runs)[0]["metrics"]
    found, _ = score_json(capsys, a, b)
    assert found["metrics"] == expected
    assert score_json(capsys, runs[0], b)[0]["metrics"] == expected
    line = refused(capsys, a, b, "--metrics", "psnr,clip_score")
    assert "--metrics clip_score: expected a run folder, which knows its prompts" in line
    (folders[1] / "03_0.bmp").rename(folders[1] / "another.bmp")
    line = refused(capsys, a, b)
    assert "expected the image 03_0 as in" in line
    assert "compare folders of the same file names" in line


BAD = {
    "--metrics fid": "--metrics fid: expected a --reference",
    "--metrics clip_score --clip big": (
        "--clip: expected clip-vit-b-32, clip-vit-l-14, embedded-clip or a"
    ),
    "--metrics fid --reference none": "--reference none: expected a folder, got no such folder",
    "--metrics fid --reference a": "--reference a: expected images of another origin",
    "--metrics psnr,": "--metrics: expected names of lpips, psnr",
}


def test_bad_input_is_one_line_and_status_2(
    runs: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAME_SD_WEIGHTS", str(tmp_path / "weights"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for options, message in BAD.items():
        assert message in refused(capsys, *runs, *options.split())


def test_another_clip_is_named_beside_its_scores(
    runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clip = save_tiny_clip(tmp_path / "my-clip")
    options = [*runs, "--metrics", "clip_score", "--clip", str(clip)]
    found, _ = score_json(capsys, *options)
    assert found["manifest"]["networks"]["clip"]["name"] == "CLIP my-clip"
    assert found["metrics"]["clip_score"]["note"] == "CLIP my-clip"


def test_not_a_number_is_never_averaged(runs: tuple[str, str]) -> None:
    a = Run.open(Path(runs[0]))

    def broken(images: list[np.ndarray]) -> Features:
        return Features(*(torch.full((len(images), n), torch.nan) for n in (4, 3)))

    broken.name = "broken"  # type: ignore[attr-defined]
    tools = Tools(networks={"inception-fid": broken})
    many = replace(a, items={f"{n}_0": item for n, item in enumerate([*a.items.values()] * 20)})
    with pytest.raises(UserError, match="is: expected finite logits, got NaN or infinity"):
        set_value(METRICS["is"], many, None, tools)
    with pytest.raises(
        UserError, match="ssim: expected numbers to average, got NaN; check the weights"
    ):
        mean_value(METRICS["ssim"], {"x_0": math.nan}, {"x_0": "x"}, tools)


def test_a_suite_fetches_no_more_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAME_SD_WEIGHTS", str(tmp_path))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    tools = Tools(fetch=("lpips-alex",))
    with pytest.raises(
        UserError, match=r"expected the weights of inception-fid.* --offline fetches nothing"
    ):
        tools.network(METRICS["fid"])
