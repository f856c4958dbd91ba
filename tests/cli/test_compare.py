"""The drawn sheet of `mame-sd compare`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mame_sd.cli import app as cli
from mame_sd.cli.compare import Panel, Way, compare, compare_sheet, summary_line, ways_of
from mame_sd.cli.sheet import Cell, difference_map, draw_sheet, write_sheet
from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.prompt_files import prompts_from_texts

TWO_STEPS = GenerateSettings(steps=2)
SMALL = MaMeConfig(min_tokens=16)
(KEY,) = prompts_from_texts(["key"])


def test_panels_are_the_unmerged_one_and_then_each_way(model: LoadedModel) -> None:
    given = {"tau": 0.2}, {"tau": 1.0}, {"keep": 0.5}
    ways = [Way(str(one), SMALL.replace(**one)) for one in given]
    panels = compare(model, KEY, TWO_STEPS, [*ways, Way("one step fewer", fewer=1)])
    assert [panel.label for panel in panels] == ["unmerged", *map(str, given), "one step fewer"]
    assert all(panel.seconds > 0 for panel in panels)
    assert panels[0].levels == panels[4].levels == []
    kept = [panel.levels[0]["tokens_kept"] for panel in panels[1:4]]
    assert kept[0] < kept[1] == 256
    assert kept[2] == 128
    assert panels[2].lines(panels[0])[2] == "level 0: 256 of 256 tokens kept"
    assert panels[0].unit == "CPU s", "which others do not lengthen"
    first, nothing, fewer = (np.asarray(panels[index].image, int) for index in (0, 2, 4))
    assert abs(first - nothing).max() <= 1  # tau = 1 merges nothing: the same noise, the same image
    assert abs(first - fewer).max() > 1
    sheet = compare_sheet(["a\x1b[31m [red] key"], [panels], "title")
    assert sheet.width > 9 * 512, "each way but the first has a difference map"
    with pytest.warns(UserWarning, match=r"no layer merges.*fewer than 1,024 tokens"):
        unmerged = compare(model, KEY, TWO_STEPS, ways_of(MaMeConfig(), TWO_STEPS))
    assert unmerged[1].levels[0]["tokens_kept"] == 256, "the default decided so: no error"


def test_one_line_says_what_merging_and_one_step_fewer_do() -> None:
    def panels(*seconds: float) -> list[Panel]:
        labels = ("unmerged", "default", "one step fewer")
        images = [Image.new("RGB", (4, 4), (level,) * 3) for level in (100, 101, 102)]
        return [Panel(*given, []) for given in zip(labels, images, seconds, strict=True)]

    rows = [panels(9.0, 4.0, 6.0), panels(4.0, 2.0, 4.0)]
    assert summary_line(rows) == "2.12 times as fast, 48 dB; one step fewer: 1.25, 42 dB"
    assert ways_of(SMALL, GenerateSettings(steps=1)) == [Way("as given", SMALL)]


def test_a_difference_map_is_white_where_images_are_equal() -> None:
    pixels = np.full((2, 2, 3), 100, np.uint8)
    other = pixels.copy()
    other[0, 0] += 100
    found = np.asarray(difference_map(Image.fromarray(pixels), Image.fromarray(other)))
    assert (found[1] == 255).all()
    assert found[0, 0].max() < 100


def test_sheets_replace_sheets_and_nothing_else(tmp_path: Path) -> None:
    sheet = draw_sheet(
        [[Cell(Image.new("RGB", (20, 20)), ("a line that is longer than its image",))]], "title"
    )
    write_sheet(tmp_path / "new" / "a.png", sheet, {"prompt": "x"})
    write_sheet(tmp_path / "new" / "a.png", sheet, {"prompt": "y"})
    with Image.open(tmp_path / "new" / "a.png") as image:
        assert json.loads(image.info["mame_sd"]) == {"prompt": "y"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.png"]
    Image.new("RGB", (2, 2)).save(tmp_path / "photo.png")
    for name, message in (
        ("photo.png", "got another file"),
        ("new", "ending in .png"),
        ("a.gif", "ending in .png"),
    ):
        with pytest.raises(UserError, match=message):
            write_sheet(tmp_path / name, sheet, {})


def test_the_command(
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    options = f"--model {model_folder} --device cpu --steps 2 --min-tokens 16".split()
    for given in (["--tau", "0.2"], ["--rounds", "2"]):
        assert cli.run(["compare", "key", "ant", *given, *options]) == 0
        said, sheet, following = capsys.readouterr().out.splitlines()
        assert "one step fewer: " in said
        assert sheet == "compare.png"
        assert following.startswith("next: mame-sd generate ")
    assert cli.run(["compare", "key", "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sheet"] == "compare.png"
    assert set(found["ways"]) == {"unmerged", "as given", "one step fewer"}
    assert [path.name for path in tmp_path.iterdir()] == ["compare.png"]
