"""examples/train_classifier.py trains, fine-tunes, goes on, and its folder is measured."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageClassification, ViTConfig, ViTImageProcessorPil

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_classifier.py"


def run(monkeypatch: pytest.MonkeyPatch, *given: str | Path) -> None:
    monkeypatch.setattr("sys.argv", [str(EXAMPLE), *map(str, given)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Make a tiny ViT's configuration, and three colours of squares in class folders."""
    form = ViTConfig(
        image_size=32, patch_size=4, hidden_size=16, num_hidden_layers=4, num_attention_heads=2,
        intermediate_size=32,
    )  # fmt: skip
    form.save_pretrained(tmp_path / "form")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "form")
    for part in ("train", "val"):
        for colour in ("red", "green", "blue"):
            folder = tmp_path / part / colour
            folder.mkdir(parents=True)
            for number in range(6):
                Image.new("RGB", (40 + number, 48), colour).save(folder / f"{number}.png")
    return {name: tmp_path / name for name in ("form", "train", "val")}


def test_it_trains_goes_on_and_fine_tunes(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ("--train", folders["train"], "--val", folders["val"], "--batch-size", "6")
    out = tmp_path / "out"
    run(monkeypatch, *data, "--config", folders["form"], "--out", out, "--epochs", "2")
    first = AutoModelForImageClassification.from_pretrained(out)
    assert first.config.id2label == {0: "blue", 1: "green", 2: "red"}
    run(monkeypatch, *data, "--config", folders["form"], "--out", out, "--epochs", "3")
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"checkpoint-9"}
    more = AutoModelForImageClassification.from_pretrained(out)
    assert not torch.equal(first.classifier.weight, more.classifier.weight)
    tuned = tmp_path / "tuned"
    run(monkeypatch, *data, "--weights", out, "--form", "last", "--out", tuned, "--epochs", "1")
    last = AutoModelForImageClassification.from_pretrained(tuned)
    assert not torch.equal(last.classifier.weight, more.classifier.weight)


@pytest.mark.parametrize(("form", "blocks"), [("quarters", {3, 6, 9}), ("last", {11})])
def test_merging_stands_where_the_form_says(form: str, blocks: set[int]) -> None:
    config = ViTConfig(num_hidden_layers=12, hidden_size=12, intermediate_size=24, image_size=64)
    model = AutoModelForImageClassification.from_config(config)
    merge = runpy.run_path(str(EXAMPLE))["merge"]
    report = merge(model, form, 0.5).report()
    assert {number for number, block in enumerate(report.layers) if block.merged} == blocks
    assert merge(model, "plain", 0.5) is None


def test_a_folder_without_classes_is_refused(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="two class folders"):
        run(
            monkeypatch, "--train", folders["train"] / "red", "--val", folders["val"],
            "--config", folders["form"], "--out", tmp_path / "out",
        )  # fmt: skip
