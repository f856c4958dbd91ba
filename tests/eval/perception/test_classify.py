"""`mame-sd-eval classify` on tiny models: values, resumed runs, errors."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import ViTModel

from mame_sd.errors import UserError
from mame_sd.eval.cli import app as cli
from mame_sd.eval.perception.data import open_images
from mame_sd.eval.perception.encoders import load_encoder
from mame_sd.eval.perception.run import Asked
from mame_sd.perception.apply_encoder import apply_encoder
from mame_sd.runs.model_files import ModelChoice
from tests.builders.classification import CLASSES, draw_classes, save_classifier, save_text_model

ROWS = "mame-0.3,smaller@mame-0.3,tome@mame-0.3,evit-0.5"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the models vit, siglip and features (without a classifier), and data."""
    folder = tmp_path_factory.mktemp("classify")
    save_classifier(folder / "vit")
    save_text_model(folder / "siglip", "SiglipModel")
    ViTModel.from_pretrained(folder / "vit").save_pretrained(folder / "features")
    shutil.copy(folder / "vit" / "preprocessor_config.json", folder / "features")
    draw_classes(folder / "data")
    return folder


def words(
    place: Path, out: Path, model: str = "vit", data: str = "data", rows: str = ROWS
) -> list[str]:
    given = ["classify", "--batch-size", "5", "--rounds", "2", "--device", "cpu", "--rows"]
    places = ["--model", str(place / model), "--data", str(place / data), "--out", str(out)]
    return [*given, rows, *places]


Figures = dict[str, dict[str, Any]]  # of each row


def figures_of(given: list[str]) -> Figures:
    """Return what the command prints as JSON, by row."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.run([*given, "--json"]) == 0
    return {row["row"]: row for row in json.loads(printed.getvalue())["rows"]}


@pytest.fixture(scope="module")
def finished(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Figures]:
    """Return a folder of results, and the figures."""
    out = tmp_path_factory.mktemp("out") / "out"
    return out, figures_of(words(place, out))


def lines_in(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()[1:]]


def test_every_row_has_every_value_and_a_line_of_the_table(
    place: Path, finished: tuple[Path, Figures], capsys: pytest.CaptureFixture[str]
) -> None:
    out, rows = finished
    assert list(rows) == ["baseline", *ROWS.split(",")]
    expected = {"flops", "throughput", "speedup", "memory", "tokens", "top1"}
    for name, row in rows.items():
        assert set(row["values"]) == expected | ({"agreement"} if name != "baseline" else set())
        value = row["values"]["throughput"]
        assert 0 < value["low"] <= value["mean"] <= value["high"]
        assert row["values"]["top1"]["n"] == 12
    tokens = {name: row["values"]["tokens"]["mean"] for name, row in rows.items()}
    assert tokens["evit-0.5"] < tokens["baseline"] == 37
    near = [rows[name]["values"]["flops"]["mean"] for name in ("mame-0.3", "tome@mame-0.3")]
    assert near[1] == pytest.approx(near[0], rel=0.05)
    assert cli.run(words(place, out)) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("|  | GFLOPs | images/s | times as fast | MiB | tokens left | agree")
    agreement = rows["evit-0.5"]["values"]["agreement"]
    text = f"{agreement['mean']:.1f} % ({agreement['low']:.1f} to {agreement['high']:.1f})"
    assert text in next(line for line in table if "EViT" in line)


@torch.no_grad()
def test_answers_flops_and_accuracy_are_those_of_the_model_called_by_hand(
    place: Path, finished: tuple[Path, Figures]
) -> None:
    encoder = load_encoder(ModelChoice(model=str(place / "vit"), device="cpu"))
    images = open_images(place / "data")
    handle = apply_encoder(encoder.model, tau=0.3, blocks=3)
    found: list[int] = []
    flops = []
    for batch in images.batches(5):
        handle.reset()
        made = encoder.inputs(images.load(batch))
        found += encoder.model(**made).logits.argmax(-1).tolist()
        flops += [handle.report().flops] * len(batch)
    out, rows = finished
    given = [answer for line in lines_in(out) for answer in line["answers"]]
    assert found == given[12:24], "behind the baseline's"
    values = rows["mame-0.3"]["values"]
    assert values["flops"]["mean"] == pytest.approx(sum(flops) / 12 / 1e9)
    same = sum(a == b for a, b in zip(found, given[:12], strict=True))
    assert values["agreement"]["mean"] == pytest.approx(100 * same / 12)
    assert images.labels is not None
    right = sum(a == label for a, label in zip(found, images.labels, strict=True))
    assert values["top1"]["mean"] == pytest.approx(100 * right / 12)


def test_a_stopped_run_continues_to_the_same_results(
    place: Path,
    finished: tuple[Path, Figures],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = 0
    inputs_of = Asked.inputs

    def stops(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:  # the second batch of the second row, as the first call is for logits
            raise UserError("stopped")
        return inputs_of(*args)

    monkeypatch.setattr(Asked, "inputs", stops)
    assert cli.run(words(place, tmp_path / "out")) == 2
    assert [line["batch"] for line in lines_in(tmp_path / "out")] == [0, 1, 2, 0]
    calls = -100
    assert cli.run(words(place, tmp_path / "out")) == 0
    # two rivals are brought to FLOPs by an image each, speed takes a batch in each round and one to
    # warm up, and logits before and after one
    assert calls + 100 == 2 + 3 * 3 + 2 + 2 + 2
    assert lines_in(tmp_path / "out") == lines_in(finished[0])
    other = [word if word != "5" else "4" for word in words(place, tmp_path / "out")]
    assert cli.run(other) == 2
    assert "expected results of the same settings" in capsys.readouterr().err


def test_a_broken_image_is_named_and_a_mended_one_alone_is_answered_anew(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "data", tmp_path / "data")
    out = tmp_path / "out"
    given = words(place, out, data=str(tmp_path / "data"), rows="mame-0.3")
    images = open_images(tmp_path / "data")
    broken = images.folder / images.files[-1]
    whole = broken.read_bytes()
    broken.write_bytes(b"no image")
    assert cli.run(given) == 2
    assert f"{images.files[-1]}, but it is not an image" in capsys.readouterr().err
    before = lines_in(out)
    assert [line["batch"] for line in before] == [0, 1]
    broken.write_bytes(whole)
    assert cli.run(given) == 0
    assert lines_in(out)[:2] == before
    Image.new("RGB", (1, 1)).save(broken)
    assert cli.run(given) == 2
    assert f"{images.files[-1]} of 1 x 1; take it out" in capsys.readouterr().err


def test_zero_shot(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "names.txt").write_text("".join(f"picture of {name}\n" for name in CLASSES))
    (tmp_path / "templates.txt").write_text("a {}.\nthe {}.\n")
    given = ["--classes", str(tmp_path / "names.txt")]
    given += ["--templates", str(tmp_path / "templates.txt")]
    out = tmp_path / "out"
    rows = figures_of([*words(place, out, "siglip", rows="mame-0.9,evit-0.5"), *given])
    head = json.loads((out / "answers.jsonl").read_text().splitlines()[0])
    assert head["about"]["answers"]["templates"] == ["a {}.", "the {}."]
    assert rows["mame-0.9"]["values"]["top1"]["n"] == 12
    assert "expected a class token to prune by" in rows["evit-0.5"]["reason"]
    assert "values" not in rows["evit-0.5"]
    assert cli.run([*words(place, tmp_path / "other"), *given[:2]]) == 2
    message = "--classes: expected none for ViTForImageClassification"
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "other").exists()


def test_images_without_labels_have_agreement_and_models_of_features_alone_are_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    values = figures_of(words(place, out, data="data/ant", rows="mame-0.3"))["mame-0.3"]["values"]
    assert values["agreement"]["n"] == 4
    assert "top1" not in values
    assert cli.run(words(place, tmp_path / "other", "features")) == 2
    message = "--model: expected a model with a classifier or a text half, got ViTModel"
    assert message in capsys.readouterr().err


def test_clips_are_answered_too(tmp_path: Path) -> None:
    save_classifier(tmp_path / "model", "VideoMAEForVideoClassification")
    for name in CLASSES:
        (tmp_path / "data" / name / "one").mkdir(parents=True)
        for frame in range(4):
            picture = Image.new("RGB", (64, 64), (40 * frame,) * 3)
            picture.save(tmp_path / "data" / name / "one" / f"{frame}.png")
    given = words(tmp_path, tmp_path / "out", "model", rows="mame-default,tome@mame-default")
    assert set(figures_of(given)) == {"baseline", "mame-default", "tome@mame-default"}
    before = lines_in(tmp_path / "out")
    assert cli.run(given) == 0
    assert lines_in(tmp_path / "out") == before
