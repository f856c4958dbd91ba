"""Clips: folders of frames and video files, the suite `video`, and rivals that see less of them."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import VideoMAEConfig, VideoMAEForVideoClassification

from mame_sd.errors import UserError
from mame_sd.eval.cli import app as cli
from mame_sd.eval.perception.clips import ClipSet, open_clips
from mame_sd.eval.perception.methods import RIVALS, Unmerged, at_flops, flops_of
from mame_sd.eval.perception.rivals import on_fewer_frames, on_smaller_images
from mame_sd.eval.perception.rows import SUITES
from mame_sd.runs.methods import NotApplicable


def tiny(frames: int = 4, side: int = 32) -> VideoMAEForVideoClassification:
    torch.manual_seed(0)
    config = VideoMAEConfig(
        image_size=side,
        patch_size=8,
        num_frames=frames,
        tubelet_size=2,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
    )
    return VideoMAEForVideoClassification(config).eval()


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


def of(clips: ClipSet, name: str) -> np.ndarray:
    return clips.load(clips.files.index(name))


def test_frames_are_evenly_spaced_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    write_frames(tmp_path / "a" / "long", [*range(0, 240, 20)])  # 10.png comes after 9.png
    write_frames(tmp_path / "b" / "short", [30, 90])
    clips = open_clips(tmp_path, 4)
    assert clips.classes == ("a", "b")
    assert of(clips, "a/long")[:, 0, 0, 0].tolist() == [0, 80, 140, 220]
    assert of(clips, "b/short")[:, 0, 0, 0].tolist() == [30, 30, 90, 90]


def test_video_files_are_read(tmp_path: Path) -> None:
    write_video(tmp_path / "b" / "film.mp4", [20, 60, 100, 140, 180, 220, 240])
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "torn.mp4").write_bytes(b"no film")
    clips = open_clips(tmp_path, 4)
    shown = of(clips, "b/film.mp4")
    assert shown.shape == (4, 64, 64, 3)
    assert np.abs(shown.mean((1, 2, 3)) - [20, 100, 180, 240]).max() < 6  # it was compressed
    with pytest.raises(UserError, match=r"expected a video in .*torn.mp4, but it can't be read"):
        clips.load(clips.files.index("a/torn.mp4"))


def test_without_pyav_video_files_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "film.mp4").write_bytes(b"no film")
    with pytest.raises(UserError, match=r"pip install mame-sd\[video\], or give folders of frames"):
        open_clips(tmp_path, 4).load(0)


def test_clips_that_can_not_be_read_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "model")
    clip = tmp_path / "data" / "a" / "one"
    write_frames(clip, [10, 50, 90, 130])

    def said() -> str:
        assert run(tmp_path, tmp_path / "model", "--rows", "baseline") == 2
        return capsys.readouterr().err.splitlines()[-1]

    frame(0, (32, 64)).save(clip / "3.png")
    assert said().startswith("error: expected frames of one size in")
    for number in range(4):
        frame(0, (1, 1)).save(clip / f"{number}.png")
    assert "of 1 x 1" in said()
    for one in clip.iterdir():
        one.unlink()
    with pytest.raises(UserError, match="expected frames"):
        open_clips(tmp_path / "data", 4).load(0)
    (tmp_path / "data" / "b").mkdir()
    with pytest.raises(UserError, match="expected folders of frames or video"):
        open_clips(tmp_path / "data", 4)


def save(model: Path) -> None:
    from transformers import VideoMAEImageProcessorPil

    made = tiny()
    made.config.id2label = {0: "a", 1: "b", 2: "c"}
    made.config.label2id = {"a": 0, "b": 1, "c": 2}
    made.save_pretrained(model)
    size = {"height": 32, "width": 32}
    VideoMAEImageProcessorPil(size=size, crop_size=size, do_center_crop=False).save_pretrained(
        model
    )


def run(place: Path, model: Path, *more: str) -> int:
    command = ["classify", "--suite", "video", "--model", str(model), "--device", "cpu"]
    command += ["--data", str(place / "data"), "--out", str(place / "out"), "--rounds", "1"]
    return cli.run([*command, "--batch-size", "2", *more])


def test_the_suite_runs_and_continues(tmp_path: Path) -> None:
    save(tmp_path / "model")
    for name in "abc":
        write_frames(tmp_path / "data" / name / "one", [40, 80, 120, 160])
    names = "mame-default,tome@mame-default,frames@mame-default,smaller-16,random-0.5"
    assert run(tmp_path, tmp_path / "model", "--rows", names) == 0
    answers = sorted(path.name for path in (tmp_path / "out" / "answers").iterdir())
    before = {name: (tmp_path / "out" / "answers" / name).read_text() for name in answers}
    assert len(answers) == 6
    assert run(tmp_path, tmp_path / "model", "--rows", names) == 0
    assert before == {name: (tmp_path / "out" / "answers" / name).read_text() for name in answers}


def test_suites_and_models_must_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "model")
    write_frames(tmp_path / "data" / "a" / "one", [40])
    command = ["classify", "--model", str(tmp_path / "model"), "--data", str(tmp_path / "data")]
    assert cli.run([*command, "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
    assert "sees clips; change it" in capsys.readouterr().err
    names = {row.name for row in SUITES["video"][1]}
    assert {"frames@mame-default", "mame-0.9", "tome@mame-0.8"} <= names


def test_fewer_frames_are_their_own_tubelets_at_their_own_times() -> None:
    """As if the others' tokens were taken out by hand."""
    model, clip = tiny(frames=8), torch.randn(2, 8, 3, 32, 32)
    inner = model.videomae
    places = inner.embeddings.position_embeddings.clone()
    tokens = inner.embeddings(clip, None).unflatten(1, (4, 16))[:, [0, 3]].flatten(1, 2)
    wanted = model.classifier(model.fc_norm(inner.encoder(tokens).last_hidden_state.mean(1)))
    with on_fewer_frames(model, 4):
        assert torch.allclose(model(clip).logits, wanted, atol=1e-6)
    assert torch.equal(inner.embeddings.position_embeddings, places)
    with pytest.raises(NotApplicable, match="multiple of a tubelet's 2 frames"):  # noqa: SIM117
        with on_fewer_frames(model, 3):
            pass


def test_smaller_frames_take_the_positions_of_the_nearest_patches() -> None:
    model, clip = tiny(), torch.randn(1, 4, 3, 16, 16)
    inner = model.videomae
    wide = torch.nn.functional.interpolate(clip.flatten(0, 1), 32, mode="bicubic", antialias=True)
    small = torch.nn.functional.interpolate(wide, 16, mode="bicubic", antialias=True)
    x = inner.embeddings.patch_embeddings.projection(small[None].transpose(1, 2))
    table = inner.embeddings.position_embeddings.view(2, 4, 4, -1)[:, [1, 3]][:, :, [1, 3]]
    x = x.flatten(2).transpose(1, 2) + table.flatten(0, 2)
    wanted = model.classifier(model.fc_norm(inner.encoder(x).last_hidden_state.mean(1)))
    with on_smaller_images(model, 16):
        assert torch.allclose(model(wide[None]).logits, wanted, atol=1e-6)
    with torch.no_grad():
        assert at_flops(model, "frames", 0.0, lambda: model(wide[None]), 32)[0] == 2
    whole = flops_of(model, Unmerged(), lambda: model(wide[None]))
    fewer = flops_of(model, RIVALS["frames"].make(2), lambda: model(wide[None]))
    assert fewer < 0.51 * whole
