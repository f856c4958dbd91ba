"""Runs are read whole and paired by key; whatever does not fit is an error that names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pytest
from PIL import Image

from mame_sd.errors import UserError
from mame_sd.eval.scoring.runs import Run, differing_settings, pair
from tests.builders.run_folders import write_run

KEYS = ["b_0", "b_1", "a_0", "a_1", "10_0", "10_1", "9_0", "9_1"]
PIXELS = np.zeros((8, 8, 3), np.uint8)
Rows = list[dict[str, Any]]


def run(folder: Path, **settings: Any) -> Path:
    """Write four prompts, the last with the text of the first, and two images each."""
    prompts = {key: {"a": "ant", "10": "star"}.get(key[:-2], "key") for key in KEYS}
    return write_run(folder, dict.fromkeys(KEYS, PIXELS), prompts, **{"steps": 1, **settings})


def rewrite(folder: Path, change: Callable[[Rows], object]) -> None:
    """Apply `change` to the records of the run's samples.jsonl."""
    path = folder / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_runs_pair_by_key_whatever_the_order_of_the_records(tmp_path: Path) -> None:
    a, b = Run.open(run(tmp_path / "a")), run(tmp_path / "b", mame={"keep": 0.5})
    rewrite(b, Rows.reverse)
    merged = Run.open(b)
    item = merged.items["10_1"]
    assert (item.prompt, item.prompt_id, item.seed, item.path.name) == ("star", "10", 0, "10_1.png")
    assert merged.settings["mame"] == {"keep": 0.5}
    pairs = pair(a, merged)
    assert [p.key for p in pairs] == list(a.items) == KEYS
    assert all((p.a.parts[-3:], p.b.parts[-3]) == (("a", "images", f"{p.key}.png"), "b")
               for p in pairs)  # fmt: skip
    assert differing_settings(a, merged) == [], "but the method"
    assert differing_settings(a, Run.open(run(tmp_path / "c", steps=2))) == ["steps: 1, 2"]


def edit(**changes: Any) -> Callable[[Path], object]:
    return lambda run: rewrite(run, lambda rows: rows[0].update(changes))


def unfinished(run: Path) -> None:
    rewrite(run, Rows.pop)
    (run / "images" / "9_1.png").unlink()


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (shutil.rmtree, "expected a run folder or a folder of images, found none"),
        (lambda run: (run / "manifest.json").unlink(), "found no manifest.json"),
        (lambda run: rewrite(run, Rows.clear), "expected a run with images, found none"),
        (edit(id="../../x", file="../../x_0"), "for the image '../../x_0'"),
        (edit(file="../../x.png"), "samples.jsonl:1: expected"),
        (lambda run: (run / "images" / "10_1.png").unlink(), r"10_1.png, found none \(1 missing"),
        (lambda run: (run / "images" / "zz.png").touch(), r"got 'zz.png' \(1 too many\)"),
        (unfinished, "expected 8 images, found 7; finish that run first"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_broken_and_unfinished_runs_are_named(
    tmp_path: Path, breaks: Callable[[Path], object], message: str
) -> None:
    folder = run(tmp_path / "b")
    breaks(folder)
    with pytest.raises(UserError, match=message):
        Run.open(folder)


def without_last(folder: Path) -> None:
    shutil.rmtree(folder)
    write_run(folder, dict.fromkeys(KEYS[:-1], PIXELS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_last, r"expected the image 9_1 as in .*, found none \(1 missing\)"),
        ({"prompt": "owl"}, "the prompt of b_0 to be 'key' as in .*, got 'owl'"),
        ({"seed": 7}, "expected the seed of b_0 to be 0 as in .* got 7"),
        ({"negative_prompt": "red"}, "expected the negative prompt of b_0"),
    ],
)
def test_runs_that_do_not_pair_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b")
    assert len(pair(Run.open(a), Run.open(b))) == 8
    if callable(change):
        change(b)
        with pytest.raises(UserError, match=message):
            pair(Run.open(b), Run.open(a))
    else:
        rewrite(b, lambda rows: rows[0].update(change))
    with pytest.raises(UserError, match=message):
        pair(Run.open(a), Run.open(b))


def test_names_pair_however_a_system_writes_their_accents(tmp_path: Path) -> None:
    """An accent may be a letter of its own, as macOS writes it, and looks the same."""
    for form in ("NFC", "NFD"):
        (tmp_path / form).mkdir()
        Image.fromarray(PIXELS).save(tmp_path / form / f"{normalize(form, 'café')}.png")
    a, b = (Run.open_any(tmp_path / form) for form in ("NFC", "NFD"))
    (found,) = pair(a, b)
    assert (found.a.parent.name, found.b.parent.name) == ("NFC", "NFD")
    whole = tmp_path / "whole"
    name = normalize("NFC", "café_0")
    write_run(whole, {name: PIXELS}, {name: "key"}, steps=1)
    (whole / "images" / f"{name}.png").rename(whole / "images" / f"{normalize('NFD', name)}.png")
    items = Run.open(whole).items
    assert list(items) == [name]
    assert items[name].path.is_file()
