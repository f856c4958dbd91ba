"""File systems that fill up or turn read-only below a run.

They are mounted, which takes root on Linux.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mame_sd.config import MaMeConfig
from mame_sd.errors import MachineError, UserError
from mame_sd.runs.generate import Summary, generate
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.prompt_files import prompts_from_texts
from tests.builders.faults import NotPermittedError, tmpfs
from tests.builders.kills import snapshot

Remount = Callable[[str], None]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Remount]]:
    """A file system that holds a few images, and a function that changes its options."""
    try:
        with tmpfs(tmp_path / "disk", "28k") as remount:
            yield tmp_path / "disk", remount
    except NotPermittedError as error:
        pytest.skip(f"mounting a file system is not permitted here ({error})")


def run(model: LoadedModel, out: Path) -> Summary:
    prompts = prompts_from_texts([f"{number} keys" for number in range(8)])
    return generate(
        model, prompts, GenerateSettings(steps=1), MaMeConfig(keep=0.5, min_tokens=16), out
    )


def test_a_disk_that_fills_up_loses_nothing(
    model: LoadedModel, disk: tuple[Path, Remount], tmp_path: Path
) -> None:
    folder, remount = disk
    with pytest.raises(
        MachineError,
        match=r"could not be written \(No space left on device\); free some space there",
    ):
        run(model, folder / "run")
    made = {path: path.stat().st_mtime_ns for path in (folder / "run" / "images").iterdir()}
    assert 0 < len(made) < 8
    remount("size=1m")
    assert run(model, folder / "run").made == 8 - len(made)
    assert {path: path.stat().st_mtime_ns for path in made} == made
    run(model, tmp_path / "undisturbed")
    assert snapshot(folder / "run") == snapshot(tmp_path / "undisturbed")


def test_a_disk_that_turns_read_only_is_one_error_and_goes_on(
    model: LoadedModel, disk: tuple[Path, Remount]
) -> None:
    folder, remount = disk
    remount("size=1m")
    run(model, folder / "run")
    expected = snapshot(folder / "run")
    (folder / "run" / "images" / "p00003_0.png").unlink()
    remount("ro")
    with pytest.raises(UserError, match="expected a folder that can be written"):
        run(model, folder / "run")
    remount("rw")
    assert run(model, folder / "run").made == 1
    assert snapshot(folder / "run") == expected
