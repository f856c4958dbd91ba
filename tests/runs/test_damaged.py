"""Damaged run folders: the run goes on or ends in a UserError, and changes nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
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
    places = [run / "manifest.json", run / "samples.jsonl", run / ".mame-sd" / "samples-0.jsonl"]
    target, kind = draw.choice([*places, *images[:1], run / "images"]), draw.randrange(5)
    data = target.read_bytes() if target.is_file() else b"{}"
    if target.is_file():
        target.unlink()
    elif target.is_dir():
        shutil.rmtree(target)
    if kind == 0:
        target.mkdir()
    elif kind == 1:
        target.symlink_to(draw.choice([outside, outside / "file", outside / "nowhere"]))
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


NAMES = ("manifest.tmp", "samples.tmp", "image-0.tmp", "samples-0.jsonl", "lock")


@pytest.mark.parametrize("name", NAMES)
def test_links_among_temporary_files_are_not_written_through(
    model: LoadedModel, finished: Path, tmp_path: Path, name: str
) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine"
    shutil.copytree(finished, run)
    mine.write_bytes(b"mine")
    (run / "manifest.json").unlink()
    (run / "samples.jsonl").unlink()
    shutil.rmtree(run / "images")
    (run / ".mame-sd").mkdir(exist_ok=True)
    (run / ".mame-sd" / name).symlink_to(mine)
    if name == "lock":
        with pytest.raises(UserError, match="can't be written"):
            generate(model, PROMPTS, FAST, None, run)
    else:
        generate(model, PROMPTS, FAST, None, run)
        assert snapshot(run / "images") == snapshot(finished / "images")
        assert not any(path.is_symlink() for path in run.rglob("*"))
    assert mine.read_bytes() == b"mine"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names")
@pytest.mark.parametrize(
    "place",
    ["manifest.json", "samples.jsonl", "image", *(f".mame-sd/{name}" for name in NAMES)],
)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    model: LoadedModel, finished: Path, tmp_path: Path, place: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / ".mame-sd").mkdir(exist_ok=True)
    path = sorted((run / "images").iterdir())[0] if place == "image" else run / place
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with deadline(60):
        if place == "image" or place.endswith(".tmp"):
            generate(model, PROMPTS, FAST, None, run)
            assert snapshot(run / "images") == snapshot(finished / "images")
        else:
            with pytest.raises(UserError, match=r"pipe|can't be written"):
                generate(model, PROMPTS, FAST, None, run)


@contextlib.contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Fail, rather than hang, after so many seconds of CPU and of waiting."""

    def late(*_: object) -> None:
        raise AssertionError("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
