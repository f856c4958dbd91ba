"""Damaged run folders: the run goes on or ends in a UserError, and changes nothing else."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from pathlib import Path

import pytest

from mame_sd.errors import UserError
from mame_sd.runs.generate import generate
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.prompt_files import prompts_from_texts
from mame_sd.runs.records import read_samples
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


def damage(draw: random.Random, run: Path, outside: Path) -> None:
    """One accident to the manifest, the records, an image or the folder of files under way."""
    images = sorted((run / "images").glob("*")) if (run / "images").is_dir() else []
    (run / ".mame-sd").mkdir(exist_ok=True)
    places = [run / "manifest.json", run / "samples.jsonl", run / ".mame-sd" / "p00001_0.json"]
    target, kind = draw.choice([*places, *images[:1], run / "images"]), draw.randrange(5)
    data = target.read_bytes() if target.is_file() else b"{}"
    if target.is_file():
        target.unlink()
    elif target.is_dir():
        shutil.rmtree(target)
    if kind == 0:
        target.mkdir()
    elif kind == 1:
        target.symlink_to(draw.choice([outside / "file", outside / "nowhere"]))
    elif kind == 2:
        cut = draw.randrange(len(data) + 1)
        target.write_bytes(data[:cut] + draw.randbytes(draw.randrange(9)))
    elif kind == 3:
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
    run, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(finished, run)
    outside.mkdir()
    (outside / "file").write_bytes(b"mine")
    damage(random.Random(seed), run, outside)
    with contextlib.suppress(UserError):
        generate(model, PROMPTS, FAST, None, run)
        assert snapshot(run / "images") == snapshot(finished / "images")
    assert snapshot(outside) == {"file": b"mine".hex()}
    with contextlib.suppress(UserError):
        read_samples(run, "make one")


@pytest.mark.parametrize("name", ["manifest.tmp", "samples.tmp", "p00001_0.tmp", "p00001_0.json"])
def test_links_among_temporary_files_are_not_written_through(
    model: LoadedModel, finished: Path, tmp_path: Path, name: str
) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine"
    mine.write_bytes(b"mine")
    (run / ".mame-sd").mkdir(parents=True)
    (run / ".mame-sd" / name).symlink_to(mine)
    generate(model, PROMPTS, FAST, None, run)
    assert snapshot(run / "images") == snapshot(finished / "images")
    assert not any(path.is_symlink() for path in run.rglob("*"))
    assert mine.read_bytes() == b"mine"
