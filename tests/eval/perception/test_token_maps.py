"""`token-maps IMAGE`: groups are those that merging made, over the image as a model sees it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mame_sd.config import MaMeConfig
from mame_sd.eval.cli import app as cli
from mame_sd.eval.cli.token_maps import mean_colors, token_maps
from mame_sd.eval.images import load_image
from mame_sd.eval.perception.encoders import LoadedEncoder, load_encoder
from mame_sd.perception.apply_encoder import apply_encoder, has_encoder_hooks
from mame_sd.runs.model_files import ModelChoice
from tests.builders.classification import save_classifier, save_text_model
from tests.builders.perception import SIDE


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("maps")
    save_classifier(folder / "vit")
    save_text_model(folder / "clip")
    pixels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "image.png")
    return folder


def loaded(folder: Path) -> LoadedEncoder:
    return load_encoder(ModelChoice(model=str(folder), device="cpu"))


@pytest.mark.parametrize("model", ["vit", "clip"])
@torch.no_grad()
def test_maps_are_the_groups_of_merging(place: Path, model: str) -> None:
    encoder, picture = loaded(place / model), load_image(place / "image.png")
    seen, maps = token_maps(encoder, picture, MaMeConfig(keep=0.5), (0, 2))
    assert np.array_equal(np.asarray(seen), picture)
    assert [(one.block, one.kept) for one in maps] == [(0, 15), (2, 9)]
    assert not has_encoder_hooks(encoder.model)
    vision = encoder.model.vit if model == "vit" else encoder.model.vision_model
    handle = apply_encoder(vision, keep=0.5, blocks=(0, 2))
    handle.capture()
    vision(**encoder.inputs([picture]))
    for one in maps:
        assert one.owners.shape == (6, 6)
        assert (handle.owners(one.block)[0, 1:] - 1).tolist() == one.owners.ravel().tolist()
        kept = one.owners.ravel()[one.owners.ravel()]
        assert np.array_equal(kept, one.owners.ravel())  # an owner owns itself
    coarser = maps[1].owners.ravel()
    assert all(coarser[a] == coarser[b] for a, b in enumerate(maps[0].owners.ravel()))


def test_a_group_has_the_mean_colour_of_its_pixels() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (12, 12, 3), np.uint8)
    owners = np.array([[0, 0, 2], [3, 0, 2], [3, 3, 2]])
    drawn = np.asarray(mean_colors(Image.fromarray(pixels), owners))
    for group in (0, 2, 3):
        cells = [
            pixels[4 * r : 4 * r + 4, 4 * c : 4 * c + 4].reshape(-1, 3)
            for r, c in np.argwhere(owners == group)
        ]
        mean = np.concatenate(cells).mean(0)
        for r, c in np.argwhere(owners == group):
            assert np.array_equal(drawn[4 * r + 2, 4 * c + 2], np.rint(mean).astype(np.uint8))
    assert (drawn[5, 4] < drawn[6, 6]).all()  # a border: the group above and to the left is another
    assert (drawn[2, 4] == drawn[2, 6]).all()  # none inside of a group


def command(place: Path) -> list[str]:
    image, model = str(place / "image.png"), str(place / "vit")
    return ["token-maps", image, "--model", model, "--device", "cpu"]


def test_on_the_command_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "maps.png"
    words = [*command(place), "--keep", "0.5"]
    assert cli.run([*words, "--blocks", "3", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        *(f"block {n}: {left} of 36 patches left" for n, left in ((0, 13), (1, 6), (2, 4))),
        str(out),
    ]
    with Image.open(out) as image:
        assert image.width == 4 * 432 + 5 * 12
        about = json.loads(image.info["mame_sd"])
    assert (about["image"], about["mame"], about["blocks"]) == ("image.png", {"keep": 0.5}, "3")
    assert cli.run([*words, "--out", str(out)]) == 0  # its own drawing is written over


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--blocks", "3,,6"],
            "--blocks: expected a number such as 8, or blocks such as 3,6,9, got '3,,6'",
        ),
        (["--tile-size", "8"], "merging: tile_size: expected none for a vision transformer"),
        (["--min-tokens", "99"], "expected blocks that merge, but none had enough patches"),
    ],
)
def test_bad_options_are_one_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], message: str
) -> None:
    assert cli.run([*command(place), "--out", str(tmp_path / "a.png"), *given]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "a.png").exists()
