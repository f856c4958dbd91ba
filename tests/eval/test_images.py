"""Images come in as viewers show them or not at all, and every refusal names its file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageCms

from mame_sd.errors import UserError
from mame_sd.eval.images import check_images, frames_in, image_files, load_image, to_float


def pixels(height: int = 20, width: int = 30, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8)


PICTURE = Image.fromarray(pixels())


def test_grey_palette_and_opaque_alpha_are_the_same_picture(tmp_path: Path) -> None:
    grey = pixels(channels=1)[..., 0]
    opaque = np.concatenate([pixels(), np.full((20, 30, 1), 255, np.uint8)], 2)
    flags = grey > 127
    palette = PICTURE.quantize(16)
    expected = {
        "grey": (Image.fromarray(grey), np.stack([grey] * 3, 2)),
        "opaque": (Image.fromarray(opaque), pixels()),
        "bits": (Image.fromarray(flags), np.stack([flags * np.uint8(255)] * 3, 2)),
        "palette": (palette, np.array(palette.convert("RGB"))),
    }
    for name, (image, rgb) in expected.items():
        image.save(tmp_path / f"{name}.png")
        assert np.array_equal(load_image(tmp_path / f"{name}.png"), rgb), name


def test_far_too_large_images_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PICTURE.save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(UserError, match="decompression bomb"):
        load_image(tmp_path / "a.png")


def truncated(path: Path) -> None:
    PICTURE.save(path)
    path.write_bytes(path.read_bytes()[:-20])


def profile(*, swapped: bool) -> bytes:
    """Return the profile of sRGB, or one whose red is green."""
    data = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    tags = {b"rXYZ": b"gXYZ", b"gXYZ": b"rXYZ"} if swapped else {}
    end = 132 + 12 * int.from_bytes(data[128:132])
    table = [data[at : at + 12] for at in range(132, end, 12)]
    entries = [tags.get(entry[:4], entry[:4]) + entry[4:] for entry in table]
    return data[:132] + b"".join(entries) + data[end:]


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut.png": (truncated, "but"),
    "text.png": (lambda path: path.write_text("not a picture"), "it is not an image"),
    "nothing.png": (lambda path: None, "is not one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_whole_image_is_refused(tmp_path: Path, name: str) -> None:
    make, why = REFUSED[name]
    make(tmp_path / name)
    with pytest.raises(UserError, match=f"expected .*{name}.*{why}"):
        load_image(tmp_path / name)


def test_colours_are_those_that_viewers_show(tmp_path: Path) -> None:
    """A profile of sRGB changes nothing; where pictures are shown, another one is converted."""
    PICTURE.save(tmp_path / "a.png", icc_profile=profile(swapped=False))
    assert np.array_equal(load_image(tmp_path / "a.png"), pixels())
    red = Image.new("RGB", (4, 4), (255, 0, 0))
    see_through = red.copy()
    see_through.putalpha(0)
    for name, image in (("b.png", red), ("c.tif", red), ("d.png", see_through)):
        image.save(tmp_path / name, icc_profile=profile(swapped=True))
    shown = [load_image(tmp_path / name)[0, 0] for name in ("b.png", "c.tif", "d.png")]
    assert shown[0].tolist() == shown[1].tolist() == [0, 255, 0]
    assert shown[2].tolist() == [255, 255, 255]
    red.save(tmp_path / "e.png", icc_profile=b"none")
    assert load_image(tmp_path / "e.png")[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("ending", ["gif", "tif", "tiff", "jfif", "avif"])
def test_every_kind_that_is_read_is_found(tmp_path: Path, ending: str) -> None:
    Image.new("RGB", (8, 8), (10, 20, 30)).save(
        tmp_path / f"a.{ending.upper()}", {"jfif": "JPEG", "tif": "TIFF"}.get(ending)
    )
    (path,) = image_files(tmp_path)
    assert np.abs(load_image(path).astype(int) - [10, 20, 30]).max() <= 2


@pytest.mark.parametrize("name", ["b.heic", "b.JXL"])
def test_a_kind_that_is_not_read_is_not_left_out(tmp_path: Path, name: str) -> None:
    PICTURE.save(tmp_path / "a.png")
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=f"got '{name}' .1 of a kind that is not read.; convert"):
        image_files(tmp_path)
    with pytest.raises(UserError, match=name):
        frames_in(tmp_path)


def test_cmyk_16_bits_and_see_through_pictures_are_converted(tmp_path: Path) -> None:
    Image.new("CMYK", (4, 4), (0, 255, 255, 0)).save(tmp_path / "a.jpg")
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "b.png")
    Image.fromarray(np.full((4, 4), 100 * 257, np.uint16)).save(tmp_path / "c.png")
    PICTURE.quantize(16).save(tmp_path / "d.png", transparency=0)
    red, white, grey = (load_image(tmp_path / name)[0, 0] for name in ("a.jpg", "b.png", "c.png"))
    assert red[0] > 200 > 60 > red[1]
    assert white.tolist() == [255, 255, 255]
    assert grey.tolist() == [100, 100, 100]
    with Image.open(tmp_path / "d.png") as image:
        hidden = np.asarray(image) == 0
    assert (load_image(tmp_path / "d.png")[hidden] == 255).all()


@pytest.mark.parametrize(
    ("ending", "orientation", "back"),
    [("png", 5, Image.Transpose.TRANSPOSE), ("webp", 6, Image.Transpose.ROTATE_90)],
)
def test_pixels_are_turned_as_viewers_do(
    tmp_path: Path, ending: str, orientation: int, back: Image.Transpose
) -> None:
    file = tmp_path / f"a.{ending}"
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    PICTURE.transpose(back).save(file, exif=exif, lossless=True)
    assert np.array_equal(load_image(file), pixels())


def test_a_photograph_with_its_preview_is_one_picture(tmp_path: Path) -> None:
    preview = Image.fromarray(pixels(8, 8))
    PICTURE.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[preview])
    assert load_image(tmp_path / "a.jpg").shape == (20, 30, 3)


def test_image_files_lists_images_only(tmp_path: Path) -> None:
    PICTURE.save(tmp_path / "a.png")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "sub").mkdir()
    assert image_files(tmp_path) == [tmp_path / "a.png"]
    for path, why in (("sub", "found none"), ("a.png", "expected a folder")):
        with pytest.raises(UserError, match=why):
            image_files(tmp_path / path)


def test_tensors_keep_channels_and_order_and_wrong_ones_are_refused() -> None:
    images = [pixels(), 255 - pixels()]
    tensor = to_float(images)
    assert (tensor.shape, tensor.dtype) == ((2, 3, 20, 30), torch.float32)
    back = (tensor[1] * 255).round().to(torch.uint8).permute(1, 2, 0)
    assert torch.equal(back, torch.from_numpy(images[1]))
    for given, why in (([pixels(), pixels(width=20)], "got 20 x 20, 30 x 20"), ([], "got none")):
        with pytest.raises(UserError, match=why):
            to_float(given)
    for wrong, why in (
        (torch.full((1, 3, 8, 8), float("nan")), "got nan"),
        (torch.full((1, 3, 8, 8), 255.0), "got 255"),
        (torch.zeros(3, 8, 8), r"got torch.float32 \[3, 8, 8\]"),
    ):
        with pytest.raises(ValueError, match=why):
            check_images(wrong)
