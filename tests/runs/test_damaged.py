"""Damaged run folders: the run goes on or ends in a UserError."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from pathlib import Path

import pytest

from mame_sd.cli.sheet import folders_sheet
from mame_sd.errors import UserError
from mame_sd.runs.generate import generate
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.prompt_files import prompts_from_texts
from tests.builders.run_folders import snapshot

PROMPTS, FAST = prompts_from_texts(["key", "ant"]), GenerateSettings(steps=1)
VALUES = [None, True, -1, 2**63, 1e308, "", "\ud800", "../x", [], {}, [[]], {"a": [1]}]


def changed(draw: random.Random, value: object) -> object:
    """`value` with one entry, at any depth, taken out or of another kind."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(sorted(value))
        rest = {name: inner for name, inner in value.items() if name != key}
        return rest if draw.random() < 0.2 else {**rest, key: changed(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.8:
        return [*value[:-1], changed(draw, value[-1])]
    return draw.choice(VALUES)


def damage(draw: random.Random, run: Path) -> None:
    """One accident to the manifest, the records, an image or the folder of files under way."""
    images = sorted((run / "images").glob("*")) if (run / "images").is_dir() else []
    (run / ".mame-sd").mkdir(exist_ok=True)
    places = [run / "manifest.json", run / "samples.jsonl", run / ".mame-sd" / "samples-0.jsonl"]
    target, kind = draw.choice([*places, *images[:1], run / "images"]), draw.randrange(4)
    data = target.read_bytes() if target.is_file() else b"{}"
    if target.is_file():
        target.unlink()
    elif target.is_dir():
        shutil.rmtree(target)
    if kind == 0:
        target.mkdir()
    elif kind == 1:
        cut = draw.randrange(len(data) + 1)
        target.write_bytes(data[:cut] + draw.randbytes(draw.randrange(9)))
    elif kind == 2:
        lines = data.split(b"\n") if target.suffix == ".jsonl" else [data]
        with contextlib.suppress(ValueError):
            lines[0] = json.dumps(changed(draw, json.loads(lines[0]))).encode()
        target.write_bytes(b"\n".join(lines))


@pytest.fixture(scope="module")
def finished(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    generate(model, PROMPTS, FAST, None, folder)
    return folder


@pytest.mark.parametrize("seed", range(16))
def test_a_damaged_run_goes_on_or_says_why_not(
    model: LoadedModel, finished: Path, tmp_path: Path, seed: int
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    damage(random.Random(seed), run)
    with contextlib.suppress(UserError):
        generate(model, PROMPTS, FAST, None, run)
        assert snapshot(run / "images") == snapshot(finished / "images")
    with contextlib.suppress(UserError):
        folders_sheet([run], limit=2)
