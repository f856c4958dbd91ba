"""The drawn sheets: compare, and finished runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mame_sd.cli import app as cli
from mame_sd.cli.compare import (
    Panel,
    compare,
    compare_sheet,
    folders_sheet,
    remark_on_seconds,
    variants_of,
)
from mame_sd.cli.sheet import Cell, draw_sheet, write_sheet
from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.generate import generate
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.prompt_files import prompts_from_texts
from tests.builders.run_folders import write_run

TWO_STEPS = GenerateSettings(steps=2)
SMALL = MaMeConfig(min_tokens=16)
(KEY,) = prompts_from_texts(["key"])


def test_panels_are_the_baseline_and_then_each_setting(model: LoadedModel) -> None:
    panels = compare(model, KEY, TWO_STEPS, variants_of(SMALL, [0.2, 1.0], [0.5]))
    assert [panel.label for panel in panels] == ["baseline", "tau 0.2", "tau 1", "keep 0.5"]
    assert panels[0].levels == []
    kept = [panel.levels[0]["tokens_kept"] for panel in panels[1:]]
    assert kept[0] < kept[1] == 256
    assert kept[2] == 128
    assert panels[2].lines(panels[0])[3] == "level 0: 256 of 256 tokens kept"
    first, nothing = (np.asarray(panels[index].image, int) for index in (0, 2))
    assert abs(first - nothing).max() <= 1  # tau = 1 merges nothing: the same noise, the same image
    sheet = compare_sheet("a\x1b[31m [red] key", panels)
    assert sheet.width > 4 * 512


def test_nothing_to_merge_is_an_error(model: LoadedModel) -> None:
    with pytest.raises(UserError, match="fewer than 1024 tokens"):
        compare(model, KEY, TWO_STEPS, variants_of(MaMeConfig(), [0.8], []))


def test_finished_runs_side_by_side(model: LoadedModel, tmp_path: Path) -> None:
    prompts = prompts_from_texts(["key", "ant"])
    generate(model, prompts, TWO_STEPS, None, tmp_path / "baseline")
    generate(model, prompts, TWO_STEPS, SMALL, tmp_path / "merged")
    generate(model, prompts[:1], TWO_STEPS, SMALL, tmp_path / "short")
    sheet = folders_sheet([tmp_path / "baseline", tmp_path / "merged"], limit=2)
    assert folders_sheet([tmp_path / "baseline"], limit=1).height < sheet.height
    with pytest.raises(
        UserError, match=r"expected the image p00002_0, which .*baseline has, found none"
    ):
        folders_sheet([tmp_path / "baseline", tmp_path / "short"], limit=2)


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
    with pytest.raises(UserError, match="show fewer"):
        draw_sheet([[Cell(Image.new("RGB", (20_000, 1)))]])


def test_the_commands(
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    options = f"--model {model_folder} --device cpu --steps 2 --min-tokens 16".split()
    assert cli.run(["compare", "key", "--tau", "0.2,0.9", *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "compare.png"
    assert cli.run(["compare", "key", *options]) == 0
    panels = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert panels == ["baseline", "as given", "keep 0.5", "keep 0.125", "compare.png"]
    assert cli.run(["generate", "--prompt", "key", "--out", "run", *options]) == 0
    assert cli.run(["sheet", "run", "run", "--out", "both.png"]) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"compare.png", "both.png", "run"}


def test_a_file_that_is_a_bomb_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, {"p_0": np.zeros((8, 8, 3), np.uint8)})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    given = ["sheet", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "s.png")]
    assert cli.run(given) == 2
    assert "can't be read as an image" in capsys.readouterr().err


def test_seconds_of_a_busy_machine_are_remarked_on(capsys: pytest.CaptureFixture[str]) -> None:
    grey = Image.new("RGB", (4, 4))
    quiet = [Panel("baseline", grey, 2.0, [], 0.9), Panel("default", grey, 1.0, [])]
    remark_on_seconds(quiet)
    assert capsys.readouterr().err == ""
    remark_on_seconds([*quiet, Panel("keep 0.5", grey, 9.0, [], 0.2)])
    assert "had 20% of its cores" in capsys.readouterr().err
