"""Images come in unchanged or not at all, and every refusal names its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from mame_sd.errors import UserError
from mame_sd.eval.images import (
    check_images,
    image_files,
    load_image,
    size_of,
    to_float,
    turned_note,
)


def pixels(height: int = 20, width: int = 30, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8)


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "a.png"
    Image.fromarray(pixels()).save(path)
    return path


def test_grey_palette_and_opaque_alpha_are_the_same_picture(tmp_path: Path) -> None:
    grey = pixels(channels=1)[..., 0]
    opaque = np.concatenate([pixels(), np.full((20, 30, 1), 255, np.uint8)], 2)
    flags = grey > 127
    palette = Image.fromarray(pixels()).quantize(16)
    expected = {
        "grey": (Image.fromarray(grey), np.stack([grey] * 3, 2)),
        "opaque": (Image.fromarray(opaque), pixels()),
        "bits": (Image.fromarray(flags), np.stack([flags * np.uint8(255)] * 3, 2)),
        "palette": (palette, np.array(palette.convert("RGB"))),
    }
    for name, (image, rgb) in expected.items():
        image.save(tmp_path / f"{name}.png")
        assert np.array_equal(load_image(tmp_path / f"{name}.png"), rgb), name


def see_through(path: Path) -> None:
    Image.fromarray(pixels(channels=4)).save(path)


def see_through_palette(path: Path) -> None:
    Image.fromarray(pixels()).quantize(16).save(path, transparency=0)


def grey_16(path: Path) -> None:
    Image.fromarray(pixels(channels=1)[..., 0].astype(np.uint16) * 257).save(path)


def rgb_16(path: Path) -> None:
    """Pillow cannot write it: a 1 x 1 PNG of 16 bits a channel, by hand."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    data = zlib.compress(b"\0" + bytes(range(6)))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


def animated(path: Path) -> None:
    Image.fromarray(pixels()).save(
        path, save_all=True, append_images=[Image.fromarray(255 - pixels())]
    )


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (see_through, "see-through pixels"),
        (see_through_palette, "see-through pixels"),
        (grey_16, "16 bits"),
        (rgb_16, "16 bits"),
        (animated, "2 frames"),
    ],
)
def test_a_png_that_rgb_would_change_is_refused(tmp_path: Path, make, got: str) -> None:
    make(tmp_path / "a.png")
    with pytest.raises(UserError, match=f"a.png has {got}"):
        load_image(tmp_path / "a.png")


def test_cmyk_is_refused(tmp_path: Path) -> None:
    Image.fromarray(pixels()).convert("CMYK").save(tmp_path / "a.jpg")
    with pytest.raises(UserError, match=r"a.jpg has mode CMYK"):
        load_image(tmp_path / "a.jpg")


def test_classifying_takes_cmyk_and_see_through_pictures(tmp_path: Path) -> None:
    Image.new("CMYK", (4, 4), (0, 255, 255, 0)).save(tmp_path / "a.jpg")
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "b.png")
    Image.fromarray(np.full((4, 4), 100 * 257, np.uint16)).save(tmp_path / "c.png")
    see_through_palette(tmp_path / "d.png")
    red, white, grey = (
        load_image(tmp_path / name, convert=True)[0, 0] for name in ("a.jpg", "b.png", "c.png")
    )
    assert red[0] > 200
    assert red[1] < 60
    assert white.tolist() == [255, 255, 255]
    assert grey.tolist() == [100, 100, 100]
    with Image.open(tmp_path / "d.png") as image:
        hidden = np.asarray(image) == 0
    assert (load_image(tmp_path / "d.png", convert=True)[hidden] == 255).all()


def write_turned(path: Path, upright: np.ndarray, orientation: int) -> None:
    """A file that shows `upright`, though its pixels lie otherwise."""
    back = {5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90}
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    stored = Image.fromarray(upright).transpose(back[orientation])
    stored.save(path, exif=exif, lossless=True)


@pytest.mark.parametrize(("ending", "orientation"), [("png", 5), ("webp", 6)])
def test_pixels_are_turned_as_viewers_do(tmp_path: Path, ending: str, orientation: int) -> None:
    file = tmp_path / f"a.{ending}"
    write_turned(file, pixels(), orientation)
    assert np.array_equal(load_image(file), pixels())
    assert np.array_equal(load_image(file, convert=True), pixels())
    assert size_of(file) == (30, 20)
    plain = tmp_path / "b.png"
    Image.fromarray(pixels()).save(plain)
    assert turned_note([file, plain]) == "1 image is turned as EXIF says, as viewers do"
    assert turned_note([plain]) == ""


def test_a_photograph_with_its_preview_is_one_picture(tmp_path: Path) -> None:
    photograph, preview = Image.fromarray(pixels()), Image.fromarray(pixels(8, 8))
    photograph.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[preview])
    assert load_image(tmp_path / "a.jpg").shape == (20, 30, 3)


def test_a_truncated_file_is_refused(png: Path) -> None:
    png.write_bytes(png.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"expected a whole image in .*a.png, but"):
        load_image(png)


def test_a_bomb_text_a_folder_and_nothing_are_refused(tmp_path: Path) -> None:
    Image.new("1", (20000, 10000)).save(tmp_path / "bomb.png")
    (tmp_path / "text.png").write_text("not a picture")
    (tmp_path / "folder.png").mkdir()
    for name, why in (
        ("bomb", "decompression bomb"),
        ("text", "it is not an image"),
        ("folder", "is not one"),
        ("none", "is not one"),
    ):
        with pytest.raises(UserError, match=why):
            load_image(tmp_path / f"{name}.png")


def test_image_files_lists_images_only(png: Path) -> None:
    (png.parent / "notes.txt").write_text("x")
    (png.parent / "sub").mkdir()
    assert image_files(png.parent) == [png]
    with pytest.raises(UserError, match="found none"):
        image_files(png.parent / "sub")
    with pytest.raises(UserError, match="expected a folder"):
        image_files(png)


def test_to_float_keeps_channels_and_order() -> None:
    images = [pixels(), 255 - pixels()]
    tensor = to_float(images)
    assert tensor.shape == (2, 3, 20, 30)
    assert tensor.dtype == torch.float32
    assert torch.equal(
        (tensor[1] * 255).round().to(torch.uint8).permute(1, 2, 0), torch.from_numpy(images[1])
    )


def test_mixed_sizes_and_nothing_are_refused() -> None:
    with pytest.raises(UserError, match="got 20 x 20, 30 x 20"):
        to_float([pixels(), pixels(width=20)])
    with pytest.raises(UserError, match="got none"):
        to_float([])


@pytest.mark.parametrize(
    ("images", "why"),
    [
        (torch.full((1, 3, 8, 8), float("nan")), "got nan"),
        (torch.full((1, 3, 8, 8), 255.0), "got 255"),
        (torch.zeros(3, 8, 8), r"got torch.float32 \[3, 8, 8\]"),
    ],
)
def test_wrong_tensors_are_refused(images: torch.Tensor, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_images(images)
