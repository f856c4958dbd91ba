"""`mame-sd-eval classify` on tiny models: every value, resumed and shared runs, images without
labels, named errors.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTModel

from mame_sd.errors import UserError
from mame_sd.eval.cli import app as cli
from mame_sd.eval.images import load_image
from mame_sd.eval.perception import answers
from mame_sd.eval.perception.data import open_images
from mame_sd.eval.perception.encoders import load_encoder
from mame_sd.perception.apply_encoder import apply_encoder
from mame_sd.runs.model_files import ModelChoice
from tests.builders.benchmarks import results_of, rows_of
from tests.builders.classification import CLASSES, draw_classes, save_classifier, save_text_model
from tests.builders.processes import in_two_processes

ROWS = "mame-0.3,smaller@mame-0.3,tome@mame-0.3,evit-0.5"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models vit and siglip, and data."""
    folder = tmp_path_factory.mktemp("classify")
    save_classifier(folder / "vit")
    save_text_model(folder / "siglip", "SiglipModel")
    draw_classes(folder / "data")
    return folder


def words(
    place: Path, out: Path, model: str = "vit", data: str = "data", rows: str = ROWS
) -> list[str]:
    given = ["classify", "--batch-size", "5", "--rounds", "2", "--device", "cpu", "--rows"]
    places = ["--model", str(place / model), "--data", str(place / data), "--out", str(out)]
    return [*given, rows, *places]


@pytest.fixture(scope="module")
def finished(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "out"
    assert cli.run(words(place, out)) == 0
    return out


def answers_in(out: Path) -> dict[str, dict[int, Any]]:
    """Batches of every row by number, whichever process made them."""
    found: dict[str, dict[int, Any]] = {}
    for path in sorted((out / "answers").iterdir()):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found.setdefault(path.name.rsplit(".", 2)[0], {}).update(
            {line["batch"]: line for line in lines[1:]}
        )
    return found


def test_every_row_has_every_value(finished: Path) -> None:
    rows = rows_of(finished)
    assert list(rows) == ["baseline", *ROWS.split(",")]
    for name, row in rows.items():
        assert row["measured"]
        expected = {"flops", "throughput", "memory", "tokens", "top1", "ahead"} | (
            {"agreement"} if name != "baseline" else set()
        )
        assert set(row["values"]) == expected
        value = row["values"]["throughput"]
        assert 0 < value["low"] <= value["mean"] <= value["high"]
        assert row["values"]["top1"]["n"] == 12
    results = results_of(finished)
    assert all(gate["passed"] for gate in results["gates"])
    assert [gate["name"] for gate in results["gates"]][-1] == "the model after all rows"
    assert rows["baseline"]["values"]["tokens"]["mean"] == 37
    assert (
        rows["evit-0.5"]["values"]["tokens"]["mean"] < rows["baseline"]["values"]["tokens"]["mean"]
    )
    near = [rows[name]["values"]["flops"]["mean"] for name in ("mame-0.3", "tome@mame-0.3")]
    assert near[1] == pytest.approx(near[0], rel=0.05)
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert "ToMe, FLOPs of MaMe τ 0.3 (paper)" in page
    assert "McNemar" in page
    assert "prompt" not in page.split("</style>")[1].split("<script>")[0]


@torch.no_grad()
def test_answers_flops_and_accuracy_are_those_of_the_model_called_by_hand(
    place: Path, finished: Path
) -> None:
    encoder = load_encoder(ModelChoice(model=str(place / "vit"), device="cpu"))
    images = open_images(place / "data")
    right, same, flops, plain = 0, 0, [], []
    for merged in (False, True):
        handle = apply_encoder(encoder.model, tau=0.3, blocks=3) if merged else None
        found: list[int] = []
        for batch in images.batches(5):
            pixels = [np.asarray(load_image(place / "data" / images.files[n])) for n in batch]
            made = encoder.processor(
                images=pixels, return_tensors="pt", input_data_format="channels_last"
            )
            if handle is not None:
                handle.reset()
            found += encoder.model(**made).logits.argmax(-1).tolist()
            if handle is not None:
                flops += [handle.report().flops] * len(batch)
        assert images.labels is not None
        right = sum(
            a == label for a, label in zip(found, images.labels, strict=True)
        )  # named in sorted order
        same, plain = sum(a == b for a, b in zip(found, plain, strict=False)), plain or found
    values = rows_of(finished)["mame-0.3"]["values"]
    assert values["flops"]["mean"] == pytest.approx(sum(flops) / 12 / 1e9)
    assert values["top1"]["mean"] == pytest.approx(100 * right / 12)
    assert values["agreement"]["mean"] == pytest.approx(100 * same / 12)


def test_rows_are_compared_with_tome_at_their_flops(place: Path, finished: Path) -> None:
    labels = open_images(place / "data").labels
    assert labels is not None
    found = {
        name: [answer for number in sorted(batches) for answer in batches[number]["answers"]]
        for name, batches in answers_in(finished).items()
    }
    right = {
        name: [a == label for a, label in zip(one, labels, strict=True)]
        for name, one in found.items()
    }
    ahead = {name: row["values"]["ahead"] for name, row in rows_of(finished).items()}
    for name in ("mame-0.3", "smaller@mame-0.3"):
        value = ahead[name]
        assert value["mean"] == pytest.approx(
            100 * (sum(right[name]) - sum(right["tome@mame-0.3"])) / 12
        )
        assert value["low"] <= value["mean"] <= value["high"]
        assert value["against"] == "tome@mame-0.3"
        assert "note" not in value
    assert {ahead[name]["withheld"] for name in ("baseline", "evit-0.5")} == {
        "no ToMe at its FLOPs"
    }
    assert ahead["tome@mame-0.3"]["withheld"] == "ToMe itself"
    assert "Ahead of ToMe" in (finished / "report.md").read_text(encoding="utf-8")


def test_a_stopped_run_continues_to_the_same_results(
    place: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = 0
    inputs_of = answers.inputs_of

    def stops(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:  # the second batch of the second row
            raise UserError("stopped")
        return inputs_of(*args)

    monkeypatch.setattr(answers, "inputs_of", stops)
    assert cli.run(words(place, tmp_path / "out")) == 2
    kept = answers_in(tmp_path / "out")
    assert {name: sorted(found) for name, found in kept.items()} == {
        "baseline": [0, 1, 2],
        "mame-0.3": [0],
    }
    calls = -100
    assert cli.run(words(place, tmp_path / "out")) == 0
    resumed = calls + 100
    assert answers_in(tmp_path / "out") == answers_in(finished)
    for name, row in rows_of(finished).items():
        again = rows_of(tmp_path / "out")[name]["values"]
        for column in ("flops", "tokens", "top1", "agreement", "ahead"):
            assert again.get(column) == row["values"].get(column)
    other = [word if word != "5" else "4" for word in words(place, tmp_path / "out")]
    assert cli.run(other) == 2
    message = "expected the settings it was begun with, got batch: 5 there, 4 here"
    assert message in capsys.readouterr().err
    assert resumed == 2 + 3 * 3 + 2  # of the speed: a batch in each round


def test_a_mended_image_alone_is_answered_anew(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "data", tmp_path / "data")
    given = words(place, tmp_path / "out", rows="mame-0.3")
    given[given.index("--data") + 1] = str(tmp_path / "data")
    images = open_images(tmp_path / "data")
    broken = images.folder / images.files[-1]
    whole = broken.read_bytes()
    broken.write_bytes(b"no image")
    assert cli.run(given) == 2
    before = answers_in(tmp_path / "out")["baseline"]
    assert sorted(before) == [0, 1]
    broken.write_bytes(whole)
    assert cli.run(given) == 0
    after = answers_in(tmp_path / "out")["baseline"]
    assert {number: after[number] for number in before} == before
    Image.new("RGB", (9, 9)).save(broken)
    assert cli.run(given) == 0
    last = answers_in(tmp_path / "out")["baseline"]
    assert last[0] == before[0]
    assert last[2]["files"] != after[2]["files"]


def test_processes_share_the_batches(place: Path, finished: Path, tmp_path: Path) -> None:
    command = words(place, tmp_path / "out", rows="mame-0.3,tome@mame-0.3")
    in_two_processes(lambda: cli.run(command), tmp_path)
    names = {path.name for path in (tmp_path / "out" / "answers").iterdir()}
    assert {"mame-0.3.0.jsonl", "mame-0.3.1.jsonl"} <= names
    want = answers_in(finished)
    assert answers_in(tmp_path / "out") == {
        name: want[name] for name in ("baseline", "mame-0.3", "tome@mame-0.3")
    }
    for column in ("flops", "top1"):
        assert (
            rows_of(tmp_path / "out")["mame-0.3"]["values"][column]
            == rows_of(finished)["mame-0.3"]["values"][column]
        )


def test_zero_shot(place: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("".join(f"{name}\tpicture of {name}\n" for name in CLASSES))
    (tmp_path / "templates.txt").write_text("a {}.\nthe {}.\n")
    given = ["--classes", str(tmp_path / "names.txt")]
    given += ["--templates", str(tmp_path / "templates.txt"), "--suite", "zero-shot"]
    out = tmp_path / "out"
    assert cli.run([*words(place, out, "siglip", rows="mame-0.9,evit-0.5"), *given]) == 0
    rows, manifest = rows_of(out), results_of(out)["manifest"]
    assert manifest["answers"]["templates"] == ["a {}.", "the {}."]
    assert rows["mame-0.9"]["values"]["top1"]["n"] == 12
    assert "ahead" not in [one["name"] for one in results_of(out)["metrics"]]
    assert "expected a class token to prune by" in rows["evit-0.5"]["reason"]
    assert rows["evit-0.5"]["measured"] is False


BAD = {
    "no-data": ("--rows mame-0.8", "--data: expected a folder of class folders"),
    "classes": (
        "--data {}/data --classes x",
        "--classes: expected none for ViTForImageClassification",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_one_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    given, message = BAD[name]
    words = ["classify", "--device", "cpu", "--model", str(place / "vit")]
    words += ["--out", str(tmp_path / "out"), *given.format(place).split()]
    assert cli.run(words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def features_alone(place: Path) -> Path:
    """A ViT without a classifier."""
    ViTModel.from_pretrained(place / "vit").save_pretrained(place / "features")
    shutil.copy(place / "vit" / "preprocessor_config.json", place / "features")
    return place / "features"


@pytest.mark.parametrize("data", ["data", "data/ant"])
@torch.no_grad()
def test_a_model_of_features_alone_answers_by_the_nearest_image_of_a_gallery(
    place: Path, features_alone: Path, tmp_path: Path, data: str
) -> None:
    out = tmp_path / "out"
    assert cli.run(words(place, out, "features", data, "mame-0.3,default-0.5")) == 0
    encoder, images = (
        load_encoder(ModelChoice(model=str(features_alone))),
        open_images(place / data),
    )
    middle = len(images.files) // 2

    def tokens(number: int) -> torch.Tensor:
        return encoder.model(**encoder.inputs([images.load(number)])).last_hidden_state[0, 0]

    gallery = [tokens(number) for number in range(middle)]
    expected = []
    for number in range(middle, len(images.files)):
        own = tokens(number)
        near = [torch.cosine_similarity(own, other, 0) for other in gallery]
        nearest = max(range(middle), key=near.__getitem__)
        expected.append(nearest if images.labels is None else images.labels[nearest])
    found = [
        n for _, batch in sorted(answers_in(out)["baseline"].items()) for n in batch["answers"]
    ]
    assert found == expected
    values = rows_of(out)["mame-0.3"]["values"]
    assert values["agreement"]["n"] == len(images.files) - middle
    if images.labels is None:
        assert values["top1"]["withheld"] == "the images have no labels"
        assert "no labels" in (out / "report.md").read_text(encoding="utf-8")
    else:
        right = sum(a == b for a, b in zip(found, images.labels[middle:], strict=True))
        top1 = rows_of(out)["baseline"]["values"]["top1"]
        assert top1["mean"] == pytest.approx(100 * right / len(found))
    assert results_of(out)["manifest"]["answers"]["gallery"]["images"] == middle
    near = {name: row["values"] for name, row in rows_of(out).items()}
    for column in ("class_token", "patches"):
        assert column not in near["baseline"]
        assert near["mame-0.3"][column]["mean"] < 0.9999
    inputs = encoder.inputs([images.load(middle)])
    whole = encoder.model(**inputs).last_hidden_state
    handle = apply_encoder(encoder.model, keep=0.5)
    handle.capture()
    own = handle.restore(encoder.model(**inputs).last_hidden_state)
    handle.remove()
    cosines = torch.cosine_similarity(own, whole, dim=-1)[0]
    first = answers_in(out)["default-0.5"][0]["near"]
    assert first["class_token"][0] == pytest.approx(cosines[0].item(), abs=1e-5)
    assert first["patches"][0] == pytest.approx(cosines[1:].mean().item(), abs=1e-5)


def test_unreadable_images_and_empty_classes_are_named(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "data", tmp_path / "data")
    (tmp_path / "data" / "ant" / "2.png").write_bytes(b"no image")
    given = words(place, tmp_path / "out")
    given[given.index("--data") + 1] = str(tmp_path / "data")
    assert cli.run(given) == 2
    assert "ant/2.png, but it is not an image" in capsys.readouterr().err
    Image.new("RGB", (1, 1)).save(tmp_path / "data" / "ant" / "2.png")
    shutil.rmtree(tmp_path / "out")
    assert cli.run(given) == 2
    assert "ant/2.png of 1 x 1; take it out" in capsys.readouterr().err.splitlines()[-1]
