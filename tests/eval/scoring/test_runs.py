"""Runs are read whole and paired by key; whatever does not fit is an error that names it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.eval.benchmark.gates import unrelated_pairs
from mame_sd.eval.scoring.runs import Run, differing_settings, pair
from mame_sd.runs.generate import generate
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.loading import LoadedModel, load_model
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.prompt_files import Prompt
from tests.builders.run_folders import write_run
from tests.builders.tiny import save_tiny_pipeline

PROMPTS = [
    Prompt(id="b", text="key"),
    Prompt(id="a", text="ant"),
    Prompt(id="10", text="star"),
    Prompt(id="9", text="key"),
]
MERGED = MaMeConfig(keep=0.5, min_tokens=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(
        ModelChoice(
            model=str(save_tiny_pipeline(tmp_path_factory.mktemp("m") / "tiny")), device="cpu"
        )
    )


@pytest.fixture(scope="module")
def made(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `a` (baseline) and `b` (merged) of the same prompts, two images each."""
    folder = tmp_path_factory.mktemp("runs")
    settings = GenerateSettings(steps=1, images_per_prompt=2, batch_size=4)
    generate(model, PROMPTS, settings, None, folder / "a")
    generate(model, PROMPTS, settings, MERGED, folder / "b")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


def rewrite(folder: Path, change: Any) -> None:
    """Apply `change` to every record of the run's samples.jsonl."""
    path = folder / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_knows_its_images_in_the_order_of_its_prompts(folder: Path) -> None:
    run = Run.open(folder / "b")
    assert list(run.items) == ["b_0", "b_1", "a_0", "a_1", "10_0", "10_1", "9_0", "9_1"]
    item = run.items["10_1"]
    assert (item.prompt, item.prompt_id, item.seed, item.path.name) == ("star", "10", 0, "10_1.png")
    assert item.row["levels"][0]["tokens_kept"] == 128
    assert run.settings["mame"]["keep"] == 0.5


def test_pairs_go_by_key_whatever_the_order_of_the_records(folder: Path) -> None:
    path = folder / "b" / "samples.jsonl"
    path.write_text("".join(line + "\n" for line in reversed(path.read_text().splitlines())))
    pairs = pair(Run.open(folder / "a"), Run.open(folder / "b"))
    assert [p.key for p in pairs] == ["b_0", "b_1", "a_0", "a_1", "10_0", "10_1", "9_0", "9_1"]
    assert all(p.a.name == p.b.name == f"{p.key}.png" for p in pairs)
    assert all(p.a.parts[-3] == "a" and p.b.parts[-3] == "b" for p in pairs)


def test_unrelated_pairs_have_other_prompts(folder: Path) -> None:
    run = Run.open(folder / "a")
    pairs = unrelated_pairs(run)
    assert [p.key for p in pairs] == list(run.items)
    for p in pairs:
        assert run.items[p.key].prompt != run.items[p.b.stem].prompt


def test_settings_that_differ_beside_the_method_are_named(model: LoadedModel, folder: Path) -> None:
    a, b = Run.open(folder / "a"), Run.open(folder / "b")
    assert differing_settings(a, b) == []
    settings = GenerateSettings(steps=2, images_per_prompt=2, batch_size=4)
    generate(model, PROMPTS, settings, None, folder / "c")
    assert differing_settings(a, Run.open(folder / "c")) == ["steps: 1, 2"]


BROKEN: dict[str, tuple[Any, str]] = {
    "no-folder": (shutil.rmtree, "expected a run folder or a folder of images, found none"),
    "no-manifest": (lambda run: (run / "manifest.json").unlink(), "found no manifest.json"),
    "empty": (
        lambda run: (run / "samples.jsonl").write_text(""),
        "expected a run with images, found none",
    ),
    "above": (
        lambda run: rewrite(
            run, lambda row: row.update(id="../../x", file=f"images/../../x_{row['repeat']}.png")
        ),
        "for the image '../../x_0'",
    ),
    "elsewhere": (
        lambda run: rewrite(run, lambda row: row.update(file="../../x.png")),
        "samples.jsonl:1: expected",
    ),
    "missing-image": (
        lambda run: (run / "images" / "10_1.png").unlink(),
        r"expected the image 10_1.png, found none \(1 missing",
    ),
    "extra-image": (
        lambda run: (run / "images" / "zz.png").write_bytes(b""),
        r"got 'zz.png' \(1 too many\)",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_runs_are_named(folder: Path, case: str) -> None:
    breaks, message = BROKEN[case]
    breaks(folder / "b")
    with pytest.raises(UserError, match=message):
        Run.open(folder / "b")


def test_unfinished_runs_are_refused(folder: Path) -> None:
    path = folder / "b" / "samples.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:-1]))
    (folder / "b" / "images" / "9_1.png").unlink()
    with pytest.raises(UserError, match="expected 8 images, found 7; finish that run first"):
        Run.open(folder / "b")


CHANGES: dict[str, tuple[Any, str]] = {
    "missing": (
        lambda rows: rows.pop(),
        r"expected the image z_0 as in .*a, found none \(1 missing\)",
    ),
    "prompt": (
        lambda rows: rows[2].update(prompt="owl"),
        "the prompt of z_0 to be 'prompt z' as in .*, got 'owl'",
    ),
    "seed": (
        lambda rows: rows[0].update(seed=7),
        "expected the seed of x_0 to be 0 as in .* got 7",
    ),
    "extra": (
        lambda rows: rows.append({**rows[0], "id": "more"}),
        "expected the image more_0 as in .*b, found none",
    ),
    "negative-prompt": (
        lambda rows: rows[1].update(negative_prompt="red"),
        "expected the negative prompt of y_0",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_runs_that_do_not_pair_are_refused(tmp_path: Path, case: str) -> None:
    change, message = CHANGES[case]
    pixels = np.zeros((8, 8, 3), np.uint8)
    a, b = (
        write_run(tmp_path / name, dict.fromkeys(("x_0", "y_0", "z_0"), pixels)) for name in "ab"
    )
    assert len(pair(Run.open(a), Run.open(b))) == 3
    rows = [json.loads(line) for line in (b / "samples.jsonl").read_text().splitlines()]
    change(rows)
    shutil.rmtree(b)
    write_run(b, {f"{row['id']}_{row['repeat']}": pixels for row in rows})
    known = {"prompt", "seed", "negative_prompt"}
    changed = {row["id"]: {name: row[name] for name in known & row.keys()} for row in rows}
    rewrite(b, lambda row: row.update(changed[row["id"]]))
    with pytest.raises(UserError, match=message):
        pair(Run.open(a), Run.open(b))
