"""The trainings of the suite `trained` run through, resume to the very same weights, and write what
the suite reads.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mame_sd.eval.perception.data import open_images
from mame_sd.eval.perception.encoders import load_encoder
from mame_sd.eval.perception.forms import FORMS, PLAIN, find_models
from mame_sd.perception.apply_encoder import apply_encoder
from mame_sd.runs.model_files import ModelChoice
from scripts.training import train_vit
from tests.builders.trainings import smoke


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("vit") / "whole"
    smoke(train_vit, work)
    return work


def weights(work: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(work / "models" / name / "model.safetensors")


@pytest.mark.training
def test_a_stopped_and_resumed_training_gives_the_same_weights(whole: Path, tmp_path: Path) -> None:
    smoke(train_vit, tmp_path, "--until", "scratch-0")
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"plain-0", "scratch-0"}
    shutil.rmtree(tmp_path / "models" / "scratch-0")
    (tmp_path / "scratch-0.pt").unlink()
    smoke(train_vit, tmp_path, "--until", "last-0")
    for name in ("plain-0", "scratch-0", "last-0"):
        wanted, resumed = weights(whole, name), weights(tmp_path, name)
        assert all(torch.equal(resumed[key], value) for key, value in wanted.items()), name


@pytest.mark.training
def test_another_head_is_refused_in_the_same_folder(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"2"):
        smoke(train_vit, whole, "--head", "class")
    assert 'expected what it was begun with, {"head": "mean"' in capsys.readouterr().err


@pytest.mark.training
def test_what_is_written_is_a_small_vit_in_every_form_that_the_suite_finds(whole: Path) -> None:
    models = find_models(whole)
    assert (models.seeds, models.forms) == ((0, 1), tuple(FORMS))
    images = open_images(models.pictures)
    assert len(images.files) == 12
    encoder = load_encoder(ModelChoice(model=str(models.model("scratch", 0)), device="cpu"))
    assert set(images.classes) <= set(encoder.labels)
    handle = apply_encoder(encoder.model, **FORMS["scratch"].merging)
    encoder.model(**encoder.inputs([np.zeros((64, 64, 3), np.uint8)]))
    assert [block.tokens_kept for block in handle.report().blocks][::3] == [64, 32, 16, 8]
    training = json.loads((models.model("last", 1) / "training.json").read_text())
    assert training == {
        "form": "last",
        "seed": 1,
        "steps": 1,
        "merging": {"tau": 0.5, "blocks": [-1]},
    }


def test_an_epoch_shows_every_picture_once_and_each_seed_in_its_own_order() -> None:
    pixels = (
        torch.arange(12, dtype=torch.uint8)
        .view(12, 1, 1, 1)
        .expand(-1, 3, train_vit.SIDE, train_vit.SIDE)
    )
    orders = []
    for seed in (0, 1):
        stage = train_vit.Stage(FORMS[PLAIN], seed, 6, 4, 0.01)
        batches = [train_vit.draw_batch(pixels, torch.arange(12), stage, step) for step in range(6)]
        shown = [label for _, labels in batches for label in labels.tolist()]
        assert sorted(shown[:12]) == sorted(shown[12:]) == list(range(12))
        assert shown[:12] != shown[12:]
        orders.append(shown)
        for made, labels in batches:
            assert made.shape == (4, 3, train_vit.SIDE, train_vit.SIDE)
            torch.testing.assert_close(made[:, 0, 0, 0], (labels / 255 - 0.5) / 0.25)
    assert orders[0] != orders[1]


def test_pictures_are_means_of_cells() -> None:
    pixels = np.zeros((256, 256, 3), np.uint8)
    pixels[:4, :4] = 100
    pixels[4:6, :4] = 200
    small = train_vit.small(pixels)
    assert small.shape == (64, 64, 3)
    assert (small[0, 0] == 100).all()
    assert (small[1, 0] == 100).all()
    assert small[2:].max() == 0
