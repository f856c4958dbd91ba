"""The drawn sheets: compare, and finished runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mame_sd.cli import app as cli
from mame_sd.cli.compare import compare, compare_sheet, folders_sheet, variants_of
from mame_sd.cli.sheet import Cell, draw_sheet, write_sheet
from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.prompt_files import prompts_from_texts
from tests.builders.run_folders import write_run

TWO_STEPS = GenerateSettings(steps=2)
SMALL = MaMeConfig(min_tokens=16)
(KEY,) = prompts_from_texts(["key"])


def test_panels_are_the_baseline_and_then_each_setting(model: LoadedModel) -> None:
    given = {"tau": 0.2}, {"tau": 1.0}, {"keep": 0.5}
    panels = compare(model, KEY, TWO_STEPS, [(str(one), SMALL.replace(**one)) for one in given])
    assert [panel.label for panel in panels] == ["baseline", *map(str, given)]
    assert panels[0].levels == []
    kept = [panel.levels[0]["tokens_kept"] for panel in panels[1:]]
    assert kept[0] < kept[1] == 256
    assert kept[2] == 128
    assert panels[2].lines(panels[0])[3] == "level 0: 256 of 256 tokens kept"
    assert panels[0].lines(panels[0])[1].endswith(" CPU s"), "which others do not lengthen"
    first, nothing = (np.asarray(panels[index].image, int) for index in (0, 2))
    assert abs(first - nothing).max() <= 1  # tau = 1 merges nothing: the same noise, the same image
    sheet = compare_sheet("a\x1b[31m [red] key", panels)
    assert sheet.width > 4 * 512
    with pytest.warns(UserWarning, match=r"no layer merges.*fewer than 1,024 tokens"):
        unmerged = compare(model, KEY, TWO_STEPS, variants_of(MaMeConfig()))
    assert unmerged[1].levels[0]["tokens_kept"] == 256, "the default decided so: no error"


def test_other_shares_are_those_of_all_layers() -> None:
    """Rules of single layers would keep what they say in every panel."""
    config = SMALL.replace(layers={"*": {"keep": 0.3}})
    uniform = [(f"keep {keep:g}", SMALL.replace(keep=keep)) for keep in (0.5, 0.125)]
    assert variants_of(config) == [("as given", config), *uniform]


def test_finished_runs_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grey = np.full((8, 8, 3), 100, np.uint8)
    write_run(tmp_path / "a", {"p_0": grey, "q_0": grey})
    write_run(tmp_path / "b", {"p_0": grey + 1, "q_0": grey})
    write_run(tmp_path / "c", {"p_0": grey})
    runs = [tmp_path / name for name in "abc"]
    assert folders_sheet(runs[:1], limit=1).height < folders_sheet(runs[:2], limit=2).height
    with pytest.raises(UserError, match=r"expected the image q_0, which .*a has, found none"):
        folders_sheet(runs, limit=2)
    write_run(tmp_path / "other", {"p_0": grey}, {"p_0": "an ant"})
    with pytest.raises(UserError, match=r"p_0 of the prompt 'prompt p', as .*a has it, got 'an a"):
        folders_sheet([runs[0], tmp_path / "other"], limit=1)
    for name, end in (("long", "x"), ("longer", "y")):
        write_run(tmp_path / name, {"p_0": grey}, {"p_0": "a" * 200 + end})
    with pytest.raises(UserError, match=r"prompt 'a+x', as .*, got 'a+y'"):  # where they differ
        folders_sheet([tmp_path / "long", tmp_path / "longer"], limit=1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    with pytest.raises(UserError, match="can't be read as an image"):  # a bomb
        folders_sheet(runs, limit=1)


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


def test_the_commands(
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    options = f"--model {model_folder} --device cpu --steps 2 --min-tokens 16".split()
    for given in (["--tau", "0.2"], []):
        assert cli.run(["compare", "key", *given, *options]) == 0
        panels = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
        assert panels == ["baseline", "as given", "keep 0.5", "keep 0.125", "compare.png"]
    assert cli.run(["generate", "--prompt", "key", "--out", "run", *options]) == 0
    assert cli.run(["sheet", "run", "run", "--out", "both.png"]) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"compare.png", "both.png", "run"}
