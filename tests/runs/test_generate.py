"""Run folders: what an image depends on, resuming, kills, several processes."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from PIL import Image

from mame_sd.cli import app as cli
from mame_sd.config import MaMeConfig
from mame_sd.errors import MachineError, UserError
from mame_sd.runs.generate import Summary, generate
from mame_sd.runs.jobs import GenerateSettings, cut_batches, generator_of, jobs_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.prompt_files import Prompt, prompts_from_texts
from mame_sd.runs.run_folder import RunFolder
from tests.builders.processes import in_child, in_two_processes, kill_at
from tests.builders.run_folders import snapshot

PROMPTS = prompts_from_texts(["key", "ant", "star"])
MERGED = MaMeConfig(keep=0.5, min_tokens=16)
FAST = GenerateSettings(steps=1)
STRANGE: list[dict[str, Any]] = [
    {"repeat": {}},
    {"file": "../p00001_0.png"},
    {"levels": 3},
    {"levels": [{"tokens_in": 4, "tokens_kept": 2}]},
    {"levels": [{"level": 0, "tokens_in": 0, "tokens_kept": 0}]},
    {"seconds": 1e999},
    {"seconds": "soon"},
]
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")


def run(
    model: LoadedModel,
    out: Path,
    settings: GenerateSettings = FAST,
    config: Any = MERGED,
    **kwargs: Any,
) -> Summary:
    return generate(model, kwargs.pop("prompts", PROMPTS), settings, config, out, **kwargs)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_run_leaves_images_samples_and_a_manifest_and_is_not_made_again(
    model: LoadedModel, tmp_path: Path
) -> None:
    folder, odd = tmp_path / "deep" / "run", "a\x1b[31m \u2603\n\0key"
    settings = GenerateSettings(steps=1, images_per_prompt=2)
    prompts = prompts_from_texts(["key", odd])
    summary = run(model, folder, settings, prompts=prompts)
    assert (summary.images, summary.made) == (4, 4)
    assert summary.levels[0] == {
        "kind": "attention",
        "level": 0,
        "tokens_in": 256.0,
        "tokens_kept": 128.0,
        "merged": True,
        "share": 0.5,
    }
    assert sorted(os.listdir(folder)) == ["images", "manifest.json", "samples.jsonl"]
    names = ["p00001_0", "p00001_1", "p00002_0", "p00002_1"]
    assert sorted(path.stem for path in (folder / "images").iterdir()) == names
    rows = rows_of(folder)
    assert [row["name"] for row in rows] == names
    assert rows[0]["prompt"] == "key"
    assert rows[0]["seconds"] > 0
    assert rows[0]["levels"][0]["tokens_kept"] == 128
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["settings"]["mame"]["keep"] == 0.5
    assert manifest["environment"]["threads"] == torch.get_num_threads()
    with Image.open(folder / "images" / "p00002_0.png") as image:
        image.load()
        assert image.info["prompt"] == odd.replace("\0", "\u2400")
        about = json.loads(image.info["mame_sd"])
    assert (about["prompt"], about["seed"], about["mame"]["keep"]) == (odd, 0, 0.5)
    before, times = snapshot(folder), [p.stat().st_mtime_ns for p in (folder / "images").iterdir()]
    assert run(model, folder, settings, prompts=prompts).made == 0
    assert [p.stat().st_mtime_ns for p in (folder / "images").iterdir()] == times
    assert snapshot(folder) == before


def test_records_of_earlier_versions_count(model: LoadedModel, tmp_path: Path) -> None:
    prompts = prompts_from_texts(["key", "ant"])
    run(model, tmp_path / "run", FAST, prompts=prompts)
    (tmp_path / "run" / ".mame-sd").mkdir()
    (tmp_path / "run" / "samples.jsonl").rename(tmp_path / "run" / ".mame-sd" / "samples-0.jsonl")
    assert run(model, tmp_path / "run", FAST, prompts=prompts).made == 0


def test_noise_depends_on_seed_id_and_repeat_alone() -> None:
    def noise(settings: GenerateSettings, prompts: list[Prompt], index: int) -> list[float]:
        return torch.randn(4, generator=generator_of(jobs_of(prompts, settings)[index])).tolist()

    base = noise(FAST, PROMPTS, 1)
    assert noise(GenerateSettings(steps=9, batch_size=3, guidance=2), PROMPTS[1:], 0) == base
    assert noise(FAST, [Prompt(id="p00002", text="other words")], 0) == base
    assert noise(GenerateSettings(seed=1), PROMPTS, 1) != base
    assert noise(FAST, [Prompt(id="x", text="ant")], 0) != base
    assert noise(GenerateSettings(images_per_prompt=2), PROMPTS[1:], 1) != base
    assert noise(FAST, [Prompt(id="p00002", text="ant", seed=1)], 0) == noise(
        GenerateSettings(seed=1), PROMPTS, 1
    )


def test_batches_are_cut_from_the_whole_list_and_are_steered_or_not() -> None:
    negative = [None, None, None, "red", "", None]  # to some models none is zeros, no empty text
    prompts = [Prompt(id=str(i), text="x", negative_prompt=text) for i, text in enumerate(negative)]
    names = [[job.name for job in batch] for batch in cut_batches(jobs_of(prompts, FAST), 2)]
    assert names == [["0_0", "1_0"], ["2_0"], ["3_0", "4_0"], ["5_0"]]


def test_a_batch_with_one_image_missing_writes_only_that_one(
    model: LoadedModel, tmp_path: Path
) -> None:
    settings = GenerateSettings(steps=1, batch_size=3)
    config = MaMeConfig(tau=0.3, min_tokens=16)  # by the shared rule neighbours matter
    run(model, tmp_path, settings, config)
    before = snapshot(tmp_path)
    (tmp_path / "images" / "p00002_0.png").unlink()
    assert run(model, tmp_path, settings, config).made == 1
    assert snapshot(tmp_path) == before


def test_an_image_that_others_cut_or_put_there_is_made_again_and_strange_records_are_dropped(
    model: LoadedModel, tmp_path: Path
) -> None:
    run(model, tmp_path)
    before, images = snapshot(tmp_path), sorted((tmp_path / "images").iterdir())
    images[1].write_bytes(images[1].read_bytes()[:-5])
    images[2].write_bytes(images[0].read_bytes())
    strange = [json.dumps({**rows_of(tmp_path)[0], **one}) for one in STRANGE]
    with open(tmp_path / "samples.jsonl", "a") as file:
        file.write("\n".join([*strange, "[" * 100_000, "{"]))
    assert run(model, tmp_path).made == 2
    assert snapshot(tmp_path) == before


def test_other_settings_are_refused_and_named(model: LoadedModel, tmp_path: Path) -> None:
    run(model, tmp_path)
    before = snapshot(tmp_path)
    for named, given in {
        "batch_size: 1 there, 2 here": {"settings": GenerateSettings(steps=1, batch_size=2)},
        "mame.keep: 0.5 there, 0.6 here": {"config": MaMeConfig(keep=0.6, min_tokens=16)},
        "mame: ": {"config": None},
        r"\(prompts\.count: 3 there, 2 here; other prompts\)": {"prompts": PROMPTS[:2]},
    }.items():
        with pytest.raises(UserError, match=named):
            run(model, tmp_path, **given)
    found = {name: data for name, data in snapshot(tmp_path).items() if not name.startswith(".")}
    assert found == before


def test_folders_that_a_run_does_not_fit_in_are_left_alone(tmp_path: Path) -> None:
    def refused(folder: Path, message: str) -> None:
        with pytest.raises(UserError, match=message):
            RunFolder(folder).prepare({"settings": {}})

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("x")
    refused(tmp_path / "a", r"with other things in it \('thesis.tex'\)")
    (tmp_path / "a" / "manifest.json").write_text("{}")
    refused(tmp_path / "a", "expected the manifest of a run")
    refused(tmp_path / "a" / "thesis.tex" / "below", "expected a folder, got the file")
    refused(tmp_path.joinpath(*["b"] * 300), "expected at most 256 new folders")
    assert sorted(os.listdir(tmp_path / "a")) == ["manifest.json", "thesis.tex"]
    if Path("/proc/self").exists():  # a folder that not even root can write to
        refused(Path("/proc/mame-sd"), "can't be")
    for name in ("images", ".mame-sd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).symlink_to(tmp_path / "elsewhere")
        refused(tmp_path / name, f"expected {name} to be a folder, got a link to")
    (tmp_path / "b" / ".mame-sd").mkdir(parents=True)
    (tmp_path / "b" / ".mame-sd" / "lock").symlink_to(tmp_path / "elsewhere")
    refused(tmp_path / "b", "can't be written")
    assert not (tmp_path / "elsewhere").exists()


@posix
def test_a_folder_is_locked_if_its_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RunFolder(tmp_path / "run")
    first.prepare({"settings": {}})
    with pytest.raises(UserError, match="another run is writing to"):
        RunFolder(tmp_path / "run").prepare({"settings": {}})
    first.close(complete=True)
    RunFolder(tmp_path / "run").prepare({"settings": {}})

    def no_lock(lock: FileLock) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "acquire", no_lock)
    RunFolder(tmp_path / "run").prepare({"settings": {}})


def test_what_others_take_away_during_a_run_is_said_and_made_again(
    model: LoadedModel, tmp_path: Path
) -> None:
    def meddle(done: int, total: int) -> None:
        if done == 3:
            (tmp_path / "run" / "images" / "p00001_0.png").unlink()
            (tmp_path / "run" / "images" / "p00002_0.png").write_bytes(b"cut")

    with pytest.raises(MachineError, match="deleted or changed meanwhile"):
        run(model, tmp_path / "run", on_progress=meddle)
    assert run(model, tmp_path / "run").made == 2
    assert len(list((tmp_path / "run" / "images").iterdir())) == 3
    assert not (tmp_path / "run" / ".mame-sd").exists()


@posix
def test_a_full_disk_is_the_machines_fault_and_loses_nothing(
    model: LoadedModel, tmp_path: Path
) -> None:
    run(model, tmp_path / "expected")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))  # the manifest fits, an image does not
    try:
        with pytest.raises(
            MachineError, match=r"p00001_0\.png: could not be written \(File too large\)"
        ):
            run(model, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run(model, tmp_path / "run").made == 3
    assert snapshot(tmp_path / "run") == snapshot(tmp_path / "expected")


def test_a_run_in_which_nothing_can_merge_is_refused_and_its_folder_takes_other_settings(
    model: LoadedModel, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="fewer than min_tokens=257"):
        run(model, tmp_path, config=MaMeConfig(tau=0.8, min_tokens=257))
    assert run(model, tmp_path, config=None).levels == []


def test_images_of_a_given_size_and_their_own_negative_prompt(
    model: LoadedModel, tmp_path: Path
) -> None:
    own = Prompt(id="own", text="key", negative_prompt="red", extra={"challenge": "x"})
    run(model, tmp_path, GenerateSettings(steps=1, width=48, height=24), prompts=[own])
    (row,) = rows_of(tmp_path)
    assert (row["width"], row["height"]) == (48, 24)
    assert (row["extra"], row["negative_prompt"]) == ({"challenge": "x"}, "red")


@posix
def test_killed_at_any_file_operation_the_next_run_ends_with_the_same_bytes(
    model: LoadedModel, tmp_path: Path
) -> None:
    prompts = PROMPTS[:2]
    run(model, tmp_path / "undisturbed", prompts=prompts)
    expected = snapshot(tmp_path / "undisturbed")
    number, status = 0, -signal.SIGKILL
    while status == -signal.SIGKILL:
        number += 1
        folder = tmp_path / f"kill-{number}"

        def killed(number: int = number, folder: Path = folder) -> None:
            kill_at(number, folder)
            run(model, folder, prompts=prompts)

        status = in_child(killed)
        assert status in (0, -signal.SIGKILL)
        run(model, folder, prompts=prompts)
        assert snapshot(folder) == expected, f"killed before file operation {number}"
    assert number > 15


@posix
def test_two_processes_share_a_run_and_make_the_same_bytes(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RunFolder.write_image

    def noted(folder: RunFolder, name: str, *rest: Any) -> None:
        (tmp_path / f"{os.getpid()} wrote {name}").touch()
        write(folder, name, *rest)

    monkeypatch.setattr(RunFolder, "write_image", noted)
    given = f"generate --prompts demo --num 5 --model {model_folder} --steps 1 --batch-size 2"
    words = [*given.split(), "--min-tokens", "16", "--device", "cpu", "--out"]
    said = in_two_processes(lambda: cli.run([*words, str(tmp_path / "two")]), tmp_path)
    assert said.count("5 images in") == 1
    assert len(list(tmp_path.glob("* wrote *"))) == 5, "each image is made once"
    assert cli.run([*words, str(tmp_path / "one")]) == 0
    assert snapshot(tmp_path / "two") == snapshot(tmp_path / "one")
