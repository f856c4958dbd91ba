"""Clips: folders of frames and video files, and the suite `video`."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mame_sd.errors import UserError
from mame_sd.eval.cli import app as cli
from mame_sd.eval.perception.data import ImageSet, open_images
from tests.builders.classification import CLASSES, save_classifier


def frame(value: int, size: tuple[int, int] = (64, 64)) -> Image.Image:
    """A frame of one grey, which says its number."""
    return Image.fromarray(np.full((size[1], size[0], 3), value, np.uint8))


def write_frames(folder: Path, values: list[int]) -> None:
    folder.mkdir(parents=True)
    for number, value in enumerate(values):
        frame(value).save(folder / f"{number}.png")


def write_video(path: Path, values: list[int]) -> None:
    av = pytest.importorskip("av")
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for value in values:
            picture = av.VideoFrame.from_ndarray(np.asarray(frame(value)), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


def of(clips: ImageSet, name: str) -> np.ndarray:
    return clips.load([clips.files.index(name)])[0]


def test_frames_are_evenly_spaced_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    write_frames(tmp_path / "a" / "long", [*range(0, 240, 20)])  # 10.png comes after 9.png
    write_frames(tmp_path / "b" / "short", [30, 90])
    clips = open_images(tmp_path, frames=4)
    assert clips.classes == ("a", "b")
    assert of(clips, "a/long")[:, 0, 0, 0].tolist() == [0, 80, 140, 220]
    assert of(clips, "b/short")[:, 0, 0, 0].tolist() == [30, 30, 90, 90]


def test_video_files_are_read(tmp_path: Path) -> None:
    write_video(tmp_path / "b" / "film.mp4", [20, 60, 100, 140, 180, 220, 240])
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "torn.mp4").write_bytes(b"no film")
    clips = open_images(tmp_path, frames=4)
    shown = of(clips, "b/film.mp4")
    assert shown.shape == (4, 64, 64, 3)
    assert np.abs(shown.mean((1, 2, 3)) - [20, 100, 180, 240]).max() < 6  # it was compressed
    with pytest.raises(UserError, match=r"expected a video in .*torn.mp4, but it can't be read"):
        of(clips, "a/torn.mp4")


def test_clips_that_can_not_be_read_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_classifier(tmp_path / "model", "VideoMAEForVideoClassification")
    clip = tmp_path / "data" / CLASSES[0] / "one"
    write_frames(clip, [10, 50, 90, 130])

    def said() -> str:
        assert run(tmp_path, "--rows", "baseline") == 2
        return capsys.readouterr().err.splitlines()[-1]

    frame(0, (32, 64)).save(clip / "3.png")
    assert said().startswith("error: expected frames of one size in")
    for number in range(4):
        frame(0, (1, 1)).save(clip / f"{number}.png")
    assert "of 1 x 1" in said()
    for one in clip.iterdir():
        one.unlink()
    with pytest.raises(UserError, match="expected frames"):
        open_images(tmp_path / "data", frames=4).load([0])


def run(place: Path, *more: str, suite: str = "video") -> int:
    command = ["classify", "--suite", suite, "--model", str(place / "model"), "--device", "cpu"]
    command += ["--data", str(place / "data"), "--out", str(place / "out"), "--rounds", "1"]
    return cli.run([*command, "--batch-size", "2", *more])


def test_the_suite_runs_and_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_classifier(tmp_path / "model", "VideoMAEForVideoClassification")
    for name in CLASSES:
        write_frames(tmp_path / "data" / name / "one", [40, 80, 120, 160])
    assert run(tmp_path, suite="vit") == 2
    assert "sees clips; change it" in capsys.readouterr().err
    names = "mame-default,tome@mame-default"
    assert run(tmp_path, "--rows", names) == 0
    before = {one.name: one.read_text() for one in (tmp_path / "out" / "answers").iterdir()}
    assert len(before) == 3
    assert run(tmp_path, "--rows", names) == 0
    assert before == {one.name: one.read_text() for one in (tmp_path / "out" / "answers").iterdir()}
