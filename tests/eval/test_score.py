"""Scores of two runs: what they are, what they refuse, and that sharing them over processes changes nothing."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mame_sd.eval.cli import app as cli
from mame_sd.eval.metric_list import METRICS, chosen_metrics, withheld_for_size
from mame_sd.eval.networks.efficientnet_lite import EfficientNetLite0
from mame_sd.eval.networks.extractors import effnet_lite0_extractor
from mame_sd.eval.scoring.reference import check_foreign, open_reference, rendered_glyphs
from mame_sd.eval.scoring.retrieval import (
    background_right,
    draw_prompts,
    rendered,
    retrieved,
    subject_of,
    subjects_by_caption,
)
from mame_sd.eval.scoring.runs import Run, pair
from mame_sd.eval.scoring.score import mean_value, set_value
from mame_sd.eval.scoring.score_file import ScoreFile
from mame_sd.eval.scoring.tools import Tools
from mame_sd.eval.scoring.withheld import withheld, withheld_by
from mame_sd.eval.weights.registry import REGISTRY
from PIL import Image

from mame_sd.errors import UserError
from mame_sd.runs.processes import Process
from tests.builders.run_folders import write_run
from tests.builders.tiny import save_tiny_clip
from tests.builders.weights import save_seeded_weights, trusted

ROOT = Path(__file__).parents[2]


def noise(seed: int, size: tuple[int, int] = (24, 32)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def shifted(pixels: np.ndarray, by: int) -> np.ndarray:
    return np.clip(pixels.astype(int) + by, 0, 255).astype(np.uint8)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Five images, and the same ones a little off, each by another amount."""
    a = {f"{i:02}_0": noise(i) for i in range(5)}
    b = {key: shifted(pixels, n + 1) for n, (key, pixels) in enumerate(a.items())}
    return write_run(tmp_path / "a", a), write_run(tmp_path / "b", b, mame={"tau": 0.8})


def score_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.run(["score", *arguments, "--format", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    assert cli.run(list(arguments)) == status
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    return lines[-1]


def test_psnr_is_the_mean_of_per_image_values(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = map(str, runs)
    found = score_json(capsys, a, b, "--metrics", "psnr,ssim")
    expected = []
    for key in Run.open(runs[0]).items:
        one, other = (np.asarray(Image.open(run / "images" / f"{key}.png"), np.float64) / 255 for run in runs)
        expected.append(-10 * math.log10(((one - other) ** 2).mean()))
    value = found["metrics"]["psnr"]
    assert value["mean"] == pytest.approx(np.mean(expected), abs=1e-4)
    assert min(expected) < value["low"] < value["mean"] < value["high"] < max(expected)
    assert value["n"] == 5
    assert set(found["metrics"]) == {"psnr", "ssim"}
    manifest = found["manifest"]
    assert manifest["run_b"]["settings"]["mame"] == {"tau": 0.8}
    assert manifest["run_a"]["sizes"] == ["32x24"]
    assert manifest["networks"] == {}
    assert manifest["versions"]["torch"] == torch.__version__


def test_equal_runs_have_infinite_psnr_in_valid_json(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["score", str(runs[0]), str(runs[0]), "--metrics", "psnr,ssim", "--format", "json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["metrics"]["psnr"]["mean"] == math.inf
    assert found["metrics"]["psnr"]["low"] is None
    assert found["metrics"]["ssim"]["mean"] == pytest.approx(1)
    assert "psnr: 5 of 5 equal\n" in captured.err


def test_one_image_has_values_and_no_intervals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", {"x_0": noise(0)})
    b = write_run(tmp_path / "b", {"x_0": shifted(noise(0), 3)})
    found = score_json(capsys, str(a), str(b), "--metrics", "psnr,fid_to_baseline,is_effnet")
    assert found["metrics"]["psnr"]["mean"] > 30
    assert (found["metrics"]["psnr"]["low"], found["metrics"]["psnr"]["n"]) == (None, 1)
    assert found["metrics"]["fid_to_baseline"]["withheld"] == "N = 1, needs 100"
    assert found["metrics"]["is_effnet"]["mean"] is None
    assert found["manifest"]["networks"] == {}  # withheld metrics load nothing


def test_tables_and_csv_hold_the_same_figures(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = map(str, runs)
    value = score_json(capsys, a, b)["metrics"]["psnr"]
    assert cli.run(["score", a, b, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["metric"] for row in rows] == ["psnr", "ssim"]
    assert float(rows[0]["mean"]) == value["mean"]
    assert cli.run(["score", a, b]) == 0
    table = capsys.readouterr().out
    assert f"{value['mean']:.2f}" in table
    assert f"{value['low']:.2f} to {value['high']:.2f}" in table


def test_other_settings_than_the_method_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", {"x_0": noise(0)}, steps=20)
    b = write_run(tmp_path / "b", {"x_0": noise(0)}, steps=10, mame={"tau": 0.8})
    assert cli.run(["score", str(a), str(b)]) == 0
    assert "note: the runs differ beside the method (steps: 20, 10)" in capsys.readouterr().err


def break_size(run: Path) -> None:
    Image.fromarray(noise(2, (24, 40))).save(run / "images" / "02_0.png")


def break_truncated(run: Path) -> None:
    path = run / "images" / "02_0.png"
    path.write_bytes(path.read_bytes()[:-40])


def break_deep(run: Path) -> None:
    Image.fromarray(np.full((24, 32), 40_000, np.uint16)).save(run / "images" / "02_0.png")


def break_clear(run: Path) -> None:
    Image.fromarray(np.dstack([noise(2), np.full((24, 32), 90, np.uint8)])).save(run / "images" / "02_0.png")


def break_text(run: Path) -> None:
    (run / "images" / "02_0.png").write_text("not an image")


@pytest.mark.parametrize("breaks", [break_size, break_truncated, break_deep, break_clear, break_text])
def test_broken_images_are_named_and_nothing_is_scored(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], breaks: Any
) -> None:
    breaks(runs[1])
    assert "02_0.png" in error_of(capsys, "score", str(runs[0]), str(runs[1]), "--format", "json")


BAD: dict[str, tuple[list[str], str]] = {
    "metric": (["A", "B", "--metrics", "psnr,beauty"], "--metrics: expected names of lpips,"),
    "no-metric": (["A", "B", "--metrics", ""], "got ''"),
    "format": (["A", "B", "--format", "xml"], "--format: expected one of table, json, csv, got 'xml'"),
    "folder": (["A", "C"], "expected the folder of a run, found none"),
    "no-run": (["A", "."], "found no manifest.json"),
    "one-run": (["A"], "Missing argument 'RUN_B'"),
    "no-reference": (["A", "B", "--metrics", "fid"], "--metrics fid: expected a --reference"),
    "reference": (["A", "B", "--metrics", "fid", "--reference", "nowhere"], "nowhere"),
    "statistics": (["A", "B", "--metrics", "fid", "--reference", "nowhere.npz"], "nowhere.npz"),
    "device": (["A", "B", "--device", "abacus"], "--device abacus: expected auto"),
    "small": (["A", "B", "--metrics", "ms_ssim"], "ms_ssim of"),
    "clip": (["A", "B", "--metrics", "clip_score", "--clip", "big"], "--clip: expected clip-vit-b-32, clip-vit-l-14 or a"),
    "no-clip": (["A", "B", "--metrics", "clip_score", "--clip", "."], "expected a CLIP model, its tokenizer"),
    "large-clip": (["A", "B", "--metrics", "clip_image", "--clip", "clip-vit-l-14", "--offline"], "--get clip-vit-l-14"),
    "own-reference": (["A", "B", "--metrics", "fid", "--reference", "A"], "--reference a: expected images of another origin"),
    "own-images": (["A", "B", "--metrics", "fd_effnet", "--reference", "B/images"], "got 5 that are also in"),
    "truth": (["A", "B", "--metrics", "retrieval"], "expected prompts of the embedded model"),
    "weights": (["A", "B", "--metrics", "lpips_vgg", "--offline", "--weights-dir", "."], "vgg"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_status_2(
    runs: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAME_SD_WEIGHTS", str(tmp_path / "weights"))
    arguments, message = BAD[case]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    names = {"A": str(runs[0]), "B": str(runs[1]), "C": str(tmp_path / "c"), "B/images": str(runs[1] / "images")}
    assert message in error_of(capsys, "score", *(names.get(word, word) for word in arguments))


def test_weights_with_another_hash_are_refused(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lpips-alex.safetensors").write_bytes(b"other bytes")
    options = ["--metrics", "psnr,lpips", "--weights-dir", str(tmp_path), "--format", "json"]
    error = error_of(capsys, "score", *map(str, runs), *options)
    assert "lpips-alex.safetensors with the sha256" in error
    assert "another file, or a broken one" in error


def test_another_clip_is_named_beside_its_scores(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clip = save_tiny_clip(tmp_path / "my-clip")
    options = [*map(str, runs), "--metrics", "clip_score,clip_image", "--clip", str(clip)]
    found = score_json(capsys, *options)
    assert found["manifest"]["networks"]["clip"]["name"] == "CLIP my-clip"
    assert [value["note"] for value in found["metrics"].values()] == ["CLIP my-clip"] * 2
    assert cli.run(["score", *options, "--format", "csv"]) == 0
    assert capsys.readouterr().out.count(",CLIP my-clip\n") == 2


def test_not_a_number_is_never_averaged(runs: tuple[Path, Path], tmp_path: Path) -> None:
    a = Run.open(runs[0])
    broken = {name: torch.full(value.shape, torch.nan) for name, value in EfficientNetLite0().state_dict().items()}
    tools = Tools(networks={"effnet-lite0": effnet_lite0_extractor(broken)})
    many = replace(a, items={f"{n}_0": item for n, item in enumerate([*a.items.values()] * 20)})
    for name in ("kid_effnet_to_baseline", "is_effnet"):
        with pytest.raises(UserError, match=f"{name}: expected finite (features|logits), got NaN or infinity"):
            set_value(METRICS[name], many, many, None, tools)
    with pytest.raises(UserError, match="ssim: expected numbers to average, got NaN; check the weights"):
        mean_value(METRICS["ssim"], {"x_0": math.nan}, {"x_0": "x"}, tools)


def test_scores_on_disk_are_of_this_version_and_these_images(runs: tuple[Path, Path], tmp_path: Path) -> None:
    pairs, path = pair(*map(Run.open, runs)), tmp_path / "scores" / "b.json"
    ScoreFile.open(path, pairs, Process()).put({"psnr": {"x_0": math.inf}}, Tools())
    written = json.loads(path.read_text())

    def found() -> Any:
        return ScoreFile.open(path, pairs, Process()).get(METRICS["psnr"], Tools())

    assert found() == {"x_0": math.inf}
    for other in ({**written, "format": "mame-sd scores 0"}, {**written, "images": "x"}, {"foreign": 1}, [], "text",
                  {**written, "metrics": {"psnr": {"values": {}}}}, {**written, "metrics": [1]}):  # fmt: skip
        path.write_text(json.dumps(other))
        assert found() is None, other
    path.write_text("{broken")
    assert found() is None


def test_a_suite_fetches_no_more_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAME_SD_WEIGHTS", str(tmp_path))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    tools = Tools(fetch=("lpips-alex",))
    with pytest.raises(UserError, match=r"expected the weights of effnet-lite0.* --offline fetches nothing"):
        tools.network(METRICS["fd_effnet"])


def test_sample_size_rules() -> None:
    assert withheld_for_size(METRICS["fid"], 99) == "N = 99, needs 100"
    assert withheld_for_size(METRICS["fid"], 100) is None
    assert withheld_for_size(METRICS["fid"], 100, 99) == "reference of 99, needs 100"
    assert withheld_for_size(METRICS["fid"], 100, 0) is None  # statistics that do not say
    assert withheld_for_size(METRICS["is"], 100, 5) is None
    assert withheld_for_size(METRICS["psnr"], 1) is None
    assert [metric.name for metric in chosen_metrics("ssim, psnr,ssim")] == ["ssim", "psnr"]


def test_fidelity_and_quality_do_not_mix() -> None:
    for metric in METRICS.values():
        against_baseline = metric.needs in ("pair", "sets")
        assert against_baseline == (metric.block == "fidelity")
        assert (metric.needs == "time") == (metric.block == "cost")


class MeanColourStandIn:
    """Stands in for an extractor, and is no network: mean colour and spread of an image, and its colour as logits."""

    name, weights_hash, resize = "stand-in", "0", "none"

    def __call__(self, images: list[np.ndarray]) -> Any:
        colour = torch.tensor(np.stack([image.mean((0, 1)) / 255 for image in images])).float()
        spread = torch.tensor([[image.std() / 255] for image in images]).float()
        return type("Features", (), {"features": torch.cat([colour, spread], 1), "logits": colour * 20})


def tools_with_stand_ins() -> Tools:
    return Tools(networks={"inception": MeanColourStandIn(), "effnet-lite0": MeanColourStandIn()})


def coloured(count: int, brighter: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(brighter)
    return {
        f"{i:03}_0": np.clip(rng.normal(90 + brighter, 30, (8, 8, 3)), 0, 255).astype(np.uint8) for i in range(count)
    }


def test_distances_follow_the_sets_and_state_their_size(tmp_path: Path) -> None:
    near, far = (Run.open(write_run(tmp_path / str(by), coloured(120, by))) for by in (5, 60))
    base = Run.open(write_run(tmp_path / "base", coloured(120, 0)))
    reference = open_reference(tmp_path / "base")
    assert (reference.name, reference.count) == ("base", 120)
    tools = tools_with_stand_ins()
    for name in ("fid", "kid", "fid_to_baseline"):
        values = [set_value(METRICS[name], run, base, reference, tools) for run in (base, near, far)]
        assert values[0]["mean"] == pytest.approx(0, abs=1e-2)
        assert values[1]["mean"] < values[2]["mean"]
        assert values[2]["n"] == 120
    assert "N = 120, below 2,048" in set_value(METRICS["fid"], near, base, reference, tools)["warning"]
    few = replace(reference, count=119)
    assert "N = 119, below 2,048" in set_value(METRICS["fid"], near, base, few, tools)["warning"]
    score = set_value(METRICS["is"], near, None, None, tools)
    assert (score["splits"], score["n"]) == (1, 120)
    assert 1 <= score["mean"] <= score["cap"]


def test_the_kernel_distance_to_the_baseline_pairs_by_key(tmp_path: Path) -> None:
    """Equal sets score 0 whatever their order; the same images under other keys do not."""
    images = coloured(100, 0)
    base = Run.open(write_run(tmp_path / "base", images))
    turned = Run.open(write_run(tmp_path / "turned", dict(reversed(images.items()))))
    swapped = Run.open(write_run(tmp_path / "swapped", dict(zip(images, reversed(images.values()), strict=True))))
    tools, metric = Tools(networks={"effnet-lite0": MeanColourStandIn()}), METRICS["kid_effnet_to_baseline"]
    same, order, other = (set_value(metric, run, base, None, tools)["mean"] for run in (base, turned, swapped))
    assert same == pytest.approx(0, abs=1e-12)
    assert order == pytest.approx(0, abs=1e-12)
    assert abs(other) > 1e-9


def test_the_reference_is_known_by_what_it_holds(tmp_path: Path) -> None:
    for name, order in (("one", 1), ("other", -1)):
        (tmp_path / name).mkdir()
        for place, pixels in zip("ab", [noise(1), noise(2)][::order], strict=True):
            Image.fromarray(pixels).save(tmp_path / name / f"{place}.png")
    one, other = open_reference(tmp_path / "one"), open_reference(tmp_path / "other")
    assert one.digest == other.digest
    assert one.about() == {"name": "one", "n": 2, "sha256": one.digest}
    Image.fromarray(noise(3)).save(tmp_path / "other" / "b.png")
    assert open_reference(tmp_path / "other").digest != one.digest
    assert len(rendered_glyphs().digest) == 64
    shared = Run.open(write_run(tmp_path / "run", {"x_0": noise(2), "y_0": noise(5)}))
    with pytest.raises(UserError, match=r"got 1 that are also in .*run \(x_0\); ask for fid_to_baseline"):
        check_foreign(one, shared)
    check_foreign(None, shared)
    check_foreign(rendered_glyphs(), shared)


def test_statistics_serve_distances_that_need_no_images(tmp_path: Path) -> None:
    run = Run.open(write_run(tmp_path / "run", coloured(120, 0)))
    tools = tools_with_stand_ins()
    features = (
        MeanColourStandIn()([np.asarray(Image.open(item.path)) for item in run.items.values()])
        .features.double()
        .numpy()
    )
    np.savez(tmp_path / "stats.npz", mu=features.mean(0), sigma=np.cov(features.T))
    reference = open_reference(tmp_path / "stats.npz")
    assert set_value(METRICS["fid"], run, None, reference, tools)["mean"] == pytest.approx(0, abs=1e-6)
    with pytest.raises(UserError, match=r"stats.npz: expected images for kid, got statistics"):
        set_value(METRICS["kid"], run, None, reference, tools)
    np.savez(tmp_path / "other.npz", mu=np.zeros(7), sigma=np.eye(7))
    with pytest.raises(UserError, match="fid: expected equal feature dims"):
        set_value(METRICS["fid"], run, None, open_reference(tmp_path / "other.npz"), tools)


@pytest.mark.parametrize("count", [99, 100])
def test_a_reference_of_statistics_withholds_what_it_cannot_serve(tmp_path: Path, count: int) -> None:
    run = Run.open(write_run(tmp_path / "run", coloured(count, 0)))
    effnet = effnet_lite0_extractor(EfficientNetLite0().state_dict())

    def reasons(name: str, dims: int, source: str) -> list[str | None]:
        path = tmp_path / "stats.npz"
        np.savez(path, mu=np.zeros(dims), sigma=np.eye(dims), n=2000, source=source)
        reference = open_reference(path)
        return [withheld(METRICS[name], run, reference), withheld_by(METRICS[name], effnet, reference)]

    few = "N = 99, needs 100" if count < 100 else None
    assert reasons("fd_effnet", 1280, "EffNetLite0") == [few, None]
    assert reasons("fd_effnet", 1280, "")[1] is None
    assert reasons("fd_effnet", 1280, "Inception")[1] == "the reference is features of Inception, needs EffNetLite0"
    assert reasons("fd_effnet", 2048, "")[1] == "the reference has 2048 dims, needs 1280"
    assert reasons("kid_effnet", 1280, "")[0] == (few or "the reference is statistics, needs images")
    assert withheld(METRICS["fd_effnet"], run, None) == (few or "no --reference to measure against")
    assert withheld(METRICS["psnr"], run, None) is None
    assert withheld(METRICS["ms_ssim"], run, None) == "images of 8 x 8, needs 176 x 176"


def test_a_reference_folder_is_taken_without_what_lies_below_it(tmp_path: Path) -> None:
    (tmp_path / "real" / "thumbnails").mkdir(parents=True)
    for place in ("one.png", "two.png", "thumbnails/one.png"):
        Image.fromarray(noise(1)).save(tmp_path / "real" / place)
    assert open_reference(tmp_path / "real").count == 2


def test_the_embedded_models_truth_is_found() -> None:
    captions = list(subjects_by_caption())
    assert len(captions) == rendered_glyphs().count == 180 * 12
    index = captions.index("key on a black background")
    assert subject_of(captions[index]) == ("key", "black")
    image = rendered(index)
    assert image.shape == (256, 256, 3)
    assert retrieved(image, "key on a black background") == 1
    assert retrieved(image, "pizza on a black background") == 0
    assert background_right(image, "pizza on a black background") == 1
    assert background_right(image, "key on a white background") == 0


def test_drawn_prompts_are_half_unseen_and_always_the_same() -> None:
    prompts = draw_prompts(128)
    assert prompts == draw_prompts(128)
    assert len({prompt.text for prompt in prompts}) == 128
    assert sum(prompt.extra["held_out"] for prompt in prompts) == 64
    assert all(prompt.text in subjects_by_caption() for prompt in prompts)
    assert len({prompt.text for prompt in draw_prompts(651)}) == 651
    with pytest.raises(UserError, match="--num: expected at most 651 drawn prompts, got 652"):
        draw_prompts(652)


EVERY_KIND = "psnr,ssim,lpips,clip_image,kid_effnet_to_baseline,fd_effnet,kid_effnet,is_effnet,clip_score"


@pytest.mark.skipif(os.name != "posix", reason="needs several processes on one machine")
def test_processes_share_scores_and_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes, 101 pairs, 100 reference images, metrics of every kind: the same figures as of one process."""
    a = {f"{i:03}_0": noise(i % 37, (32, 40)) for i in range(101)}
    b = {key: shifted(pixels, 1 + 4 * (n % 2)) for n, (key, pixels) in enumerate(a.items())}
    write_run(tmp_path / "a", a)
    write_run(tmp_path / "b", dict(reversed(b.items())))
    (tmp_path / "real").mkdir()
    for i in range(100):
        Image.fromarray(noise(i % 23 + 14, (32, 40))).save(tmp_path / "real" / f"{i}.bmp")
    (tmp_path / "weights").mkdir()
    weights = save_seeded_weights(tmp_path / "weights")
    options = [str(tmp_path / "a"), str(tmp_path / "b"), "--metrics", EVERY_KIND, "--reference", str(tmp_path / "real")]
    options += ["--offline", "--device", "cpu", "--weights-dir", str(weights)]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--main_process_port", "0", "-m", "tests.builders.weights", str(weights)]
    launch += ["score", *options, "--cache", str(tmp_path / "two"), "--format", "json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    for name, entry in trusted(weights).items():
        monkeypatch.setitem(REGISTRY, name, entry)
    two, one = json.loads(done.stdout), score_json(capsys, *options, "--cache", str(tmp_path / "one"))
    assert (two["manifest"]["processes"], one["manifest"]["processes"]) == (2, 1)
    assert two["manifest"]["networks"] == one["manifest"]["networks"]
    assert list(two["metrics"]) == list(one["metrics"]) == EVERY_KIND.split(",")
    for name, value in one["metrics"].items():
        assert value["n"] == 101
        assert leaves(two["metrics"][name]) == pytest.approx(leaves(value), abs=1e-6), name


def leaves(value: dict[str, Any]) -> dict[str, Any]:
    """Every number of a value, those of its difference too."""
    flat = {**value, **{f"difference {key}": number for key, number in value.get("difference", {}).items()}}
    return {key: number for key, number in flat.items() if isinstance(number, int | float)}


def test_features_are_put_back_into_order(tmp_path: Path) -> None:
    from mame_sd.eval.scoring.score import _interleave

    whole = torch.arange(14.0).reshape(7, 2)
    parts = [whole[rank::3] for rank in range(3)]
    assert torch.equal(_interleave(parts, 7), whole)
    assert torch.equal(_interleave([whole[:1], None], 1), whole[:1])
