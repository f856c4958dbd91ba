"""Features beside rivals: what is traced comes back at its place, unmerged rows are exact, a
destroyed model loses, runs resume.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from mame_sd.errors import UserError
from mame_sd.eval.perception import features_run as run
from mame_sd.eval.perception.data import open_images
from mame_sd.eval.perception.features import ROWS, nearness, view
from mame_sd.eval.perception.methods import Merged, Rival, Unmerged
from mame_sd.eval.perception.rules import Given, RandomDrop, ToMe, bipartite_soft_matching
from tests.builders.perception import PATCHES, SIDE
from tests.builders.perception import ROWS as MODELS

DINO = next(row for row in MODELS if row.name == "Dinov2Model, SwiGLU")


class Tiny:
    """A tiny DINOv2 whose map is its patches' first channel."""

    def __init__(self) -> None:
        self.model = DINO.build()
        self.mean, self.deviation = (0.5,) * 3, (0.5,) * 3

    def tokens(self, pixels: Tensor) -> Tensor:
        return self.model(pixels).last_hidden_state

    def map(self, patches: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
        image = patches[:, :, :1].transpose(1, 2).unflatten(2, grid)
        return torch.nn.functional.interpolate(image, size)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "pictures").mkdir()
    for number in range(8):
        pixels = rng.integers(0, 255, (SIDE, SIDE + 9, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{number}.png")
    return tmp_path / "pictures"


def made(folder: Path, **fields: Any) -> run.FeaturesRun:
    images = open_images(folder)
    given = {
        "source": Tiny(),
        "identity": {"name": "tiny"},
        "images": images,
        "files": run.half_of(images, 2),
    }
    given |= {
        "size": (SIDE, SIDE),
        "shares": [0.6],
        "rows": ["default", "smaller"],
        "out": folder.parent / "out",
    }
    return run.FeaturesRun(**{**given, **fields})


@pytest.mark.parametrize("rule", [ToMe(4), RandomDrop(0.8)], ids=lambda rule: type(rule).__name__)
def test_a_rival_s_tokens_come_back_where_they_were(rule: Any) -> None:
    pixels = DINO.batch(1)["pixel_values"]
    with Rival(rule).counted(Tiny().model) as handle:
        handle.capture()
        tokens = handle.encoder(pixels).last_hidden_state
        whole = handle.restore(tokens)
    assert whole.shape[1] == PATCHES + 1 > tokens.shape[1]
    rows = {tuple(row.tolist()) for row in tokens[0]}
    assert {tuple(row.tolist()) for row in whole[0]} == rows
    assert torch.equal(whole[:, 0], tokens[:, 0])


def test_a_matching_s_rows_are_the_groups_it_sums_up() -> None:
    metric = torch.randn(2, 12, 4, generator=torch.Generator().manual_seed(0))
    merge = bipartite_soft_matching(metric, 4, 1)
    one_hot = torch.eye(12).expand(2, -1, -1)
    members = merge(one_hot)  # [2, 8, 12]: which tokens are in each
    assert torch.equal(members.argmax(1), merge.rows())
    assert members.sum(1).eq(1).all()


def test_what_random_dropping_leaves_out_is_seen_as_its_nearest_patch() -> None:
    every = torch.cartesian_prod(torch.arange(3), torch.arange(3)).expand(1, -1, -1)
    reduced = RandomDrop(0.5)(Given(torch.arange(10.0).view(1, 10, 1), 1, 0, coords=every))
    kept = reduced.x[0, 1:, 0].long() - 1
    assert reduced.rows is not None
    for patch in range(9):
        distances = (every[0, kept] - every[0, patch]).float().norm(dim=1)
        assert distances[reduced.rows[0, patch + 1] - 1] == distances.min()


def test_nothing_merged_is_exact_and_a_destroyed_model_loses() -> None:
    source, pixels = Tiny(), DINO.batch(1)["pixel_values"]
    whole = view(source, Unmerged(), pixels)
    same = nearness(view(source, Merged(None, {"keep": 1.0}), pixels), whole)
    assert same == pytest.approx(dict.fromkeys(same, 1.0), abs=1e-5)
    merged = nearness(view(source, Merged(None, {"keep": 0.8}), pixels), whole)
    other = nearness(view(source, Unmerged(), torch.randn_like(pixels)), whole)
    assert all(other[name] < merged[name] < 1 for name in merged)


def test_rows_are_kept_and_a_run_goes_on(folder: Path) -> None:
    first = made(folder).run()
    assert [row["row"] for row in first["rows"]] == ["default", "smaller"]
    assert all(abs(row["flops"] - 0.6) < 0.12 for row in first["rows"])
    notes: list[str] = []
    again = made(folder, rows=["default", "smaller", "tome"], on_note=notes.append).run()
    assert again["rows"][:2] == first["rows"]
    assert notes.count("unmerged: done") == 1, "needed for the row that is new"
    text = run.table(again)
    assert [len(part.splitlines()) for part in text.split("\n\n")] == [2 + 3, 2 + 2]
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "smaller image" in text


@pytest.mark.parametrize("name", ROWS)
def test_every_row_runs(name: str, folder: Path) -> None:
    found = made(folder, rows=[name], shares=[0.8]).run()["rows"][0]
    assert 0 < found["flops"] < 1.1
    assert set(found["values"]) == {"class", "patches", "patches_p5", "map", "neighbour"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run.parse_size("12y"), "--size: expected pixels such as 224"),
        (lambda: run.parse_shares("2"), "--shares: expected numbers between 0 and 1"),
        (lambda: run.parse_rows("nope", ()), "--rows: expected names of default"),
    ],
)
def test_bad_input_is_one_line(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()


def test_sizes_and_pictures_that_do_not_fit(folder: Path) -> None:
    with pytest.raises(
        UserError, match="multiples of the patches' 4 pixels, two patches at least, got 1x1"
    ):
        made(folder, size=(1, 1)).run()
    with pytest.raises(UserError, match="expected 3 pictures or more"):
        made(folder, files=run.half_of(open_images(folder), 1)[:2]).run()
    Image.new("RGB", (1, 9)).save(folder / "0.png")
    with pytest.raises(UserError, match=r"got .*0\.png of 1 x 9"):
        made(folder, files=[f"{number}.png" for number in range(3)]).run()
    (folder / "0.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"0\.png"):
        made(folder, files=[f"{number}.png" for number in range(3)]).run()
