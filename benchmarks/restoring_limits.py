"""Where restoring by a fit may fail: content, guidance, other sizes.

    python -m benchmarks.restoring_limits --pack photographs.npz
    python -m benchmarks.restoring_limits --pack photographs.npz --begin 0.6
    python -m benchmarks.restoring_limits --pack photographs.npz --guidance 2 --side 82
    python -m benchmarks.restoring_limits --pack photographs.npz --side 48 --width 192

Noise is added to crops of held-out photographs, and the transformer of photographs denoises them in
four steps. Cells are means over samples of the PSNR to the unmerged sample, in dB; in brackets that
of the pixels of the text or of the single pixels alone. `scripts.training.train_photographs
--prepare` makes the pack.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from benchmarks import decibels, parser_of
from mame_sd.eval.benchmark.bench import installed
from mame_sd.eval.benchmark.rows import BASELINE, chosen_rows
from mame_sd.eval.instruments.flow import euler, guided_velocity, noise_of, times
from mame_sd.eval.instruments.models import THUMBNAIL, Instrument, load_instrument
from mame_sd.eval.tables import markdown_table
from mame_sd.runs.loading import LoadedModel
from scripts.training.photographs import read_pack

TRAINED = 64  # pixels a side of the instrument's samples; a token is 2 x 2
STEPS = 4
WORDS = ("SALE 20% off", "Exit 14 B", "milk & tea", "No entry", "open 9-17", "42 km/h", "Roma")
DOTS = 8  # pixels of a picture that differ from all around them


@dataclass(frozen=True)
class Clean:
    """Samples without noise.

    Attributes:
        label: what they are.
        images: [N, 3, H, W] in -1..1.
        thumbnails: their condition [N, 1, 3, 8, 8].
        part: bool [N, H, W], the pixels of the text or the dots. If None, there are none.
    """

    label: str
    images: Tensor
    thumbnails: Tensor
    part: Tensor | None = None


def crops(pack: Path, count: int, side: int, across: int) -> Tensor:
    """Return crops [count, 3, side, across] of held-out photographs of random sizes."""
    pictures, rng = read_pack(pack)[1], np.random.default_rng(0)
    cut = []
    for number in range(count):
        picture = pictures[number % len(pictures)]
        scale = max(across / picture.width, side / picture.height) ** rng.uniform()
        width = max(across, round(picture.width * scale))
        height = max(side, round(picture.height * scale))
        left, top = (int(rng.integers(0, n + 1)) for n in (width - across, height - side))
        picture = picture.resize((width, height), Image.Resampling.BOX)
        cut.append(np.array(picture.crop((left, top, left + across, top + side))))
    return torch.from_numpy(np.stack(cut)).movedim(-1, 1).float() / 127.5 - 1


def contents(pack: Path, count: int, side: int = TRAINED, across: int = TRAINED) -> Iterator[Clean]:
    """Yield the flattest and the most textured third of some crops, text and single pixels."""
    found = crops(pack, 3 * count, side, across)
    texture = torch.stack([found.diff(dim=dim).square().mean((1, 2, 3)) for dim in (2, 3)])
    found = found[texture.sum(0).argsort()]
    flat, textured = found[:count], found[-count:]
    text = torch.stack([_text(number, side, across) for number in range(count)])
    dots = torch.zeros(count, side // 2, across // 2)
    at = torch.rand(dots.flatten(1).shape, generator=torch.Generator().manual_seed(0)).argsort()
    dots.flatten(1).scatter_(1, at[:, :DOTS], 1)
    dots = F.pad(dots[..., None, None], (0, 1, 0, 1)).transpose(2, 3).reshape(text.shape)
    far = -flat.mean((1, 2, 3), keepdim=True).sign()  # white on dark pictures, black on bright ones
    yield Clean("flattest third", flat, thumbnails(flat))
    yield Clean("most textured third", textured, thumbnails(textured))
    for label, mask in (("text", text), ("single pixels", dots)):
        drawn = torch.lerp(flat, far.expand_as(flat), mask[:, None])
        yield Clean(f"{label} on the flattest", drawn, thumbnails(drawn), mask > 0.1)


def _text(number: int, side: int, across: int) -> Tensor:
    """Return the coverage [side, across] of five lines of text."""
    page = Image.new("L", (across, side))
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(10)
    for line in range(5):
        word = WORDS[(number + 3 * line) % len(WORDS)]
        draw.text((1, 1 + 12 * line), word, fill=255, font=font)
    return torch.from_numpy(np.array(page)).float() / 255


def thumbnails(images: Tensor) -> Tensor:
    """Return the condition of images of any size: [N, 1, 3, 8, 8]."""
    return F.adaptive_avg_pool2d(images, THUMBNAIL).unsqueeze(1)


def spread_positions(model: Any, rows: int, columns: int) -> None:
    """Interpolate the model's positions, so that so many tokens span the trained ones."""
    embed = model.pos_embed
    side = embed.pos_embed_max_size
    if (rows, columns) != (side, side):
        old = embed.pos_embed.unflatten(1, (side, side)).movedim(-1, 1)
        new = F.interpolate(old, (rows, columns), mode="bicubic", align_corners=False)
        embed.cropped_pos_embed = lambda *_: new.flatten(2).transpose(1, 2)


@torch.no_grad()
def denoised(
    instrument: Instrument, clean: Clean, begin: float, steps: int, guidance: float
) -> Tensor:
    """Return samples to which a share `begin` of noise was added, after steps of Euler's method."""
    samples = []
    for number, image in enumerate(clean.images.split(1)):
        state = torch.lerp(image, noise_of(image.shape[1:], 1, number), begin)
        thumbnail = clean.thumbnails[number, None]
        velocity = partial(guided_velocity, instrument, thumbnails=thumbnail, guidance=guidance)
        samples.append(euler(velocity, state, [begin * time for time in times(steps)]))
    return torch.cat(samples).clamp(-1, 1)


def cell(images: Tensor, reference: Tensor, part: Tensor | None = None) -> str:
    """Return the mean PSNR of images in -1..1, in brackets that of the pixels of `part`."""
    inside = "" if part is None else f" ({decibels(images, reference, part).mean():.1f})"
    return f"{decibels(images, reference).mean():.1f}{inside}"


def main() -> None:
    """Print a line for each kind of content."""
    parser = parser_of(__doc__)
    parser.add_argument("--num", type=int, default=8, help="samples of a line")
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--pack", type=Path, required=True, help="the file of photographs")
    parser.add_argument("--begin", type=float, default=1.0, help="share of noise of the contents")
    parser.add_argument("--side", type=int, default=TRAINED, help="pixels a side of the contents")
    parser.add_argument("--width", type=int, help="pixels across, if they are not square")
    args = parser.parse_args()
    torch.set_num_threads(1)
    instrument = load_instrument("photographs")
    model = LoadedModel(pipe=instrument.model, identity={"name": "photographs"}, guidance=None)
    rows = chosen_rows("mame-default,copied-0.125,fewer-1")
    print(markdown_table([f"from {args.begin:g}", *(row.label for row in rows[1:])], []))
    across = args.width or args.side
    spread_positions(instrument.model, args.side // 2, across // 2)
    for clean in contents(args.pack, args.num, args.side, across):
        found = {}
        for row in rows:
            with installed(model, row, ()):
                found[row.name] = denoised(
                    instrument, clean, args.begin, STEPS - row.fewer, args.guidance
                )
        unmerged = found.pop(BASELINE)
        cells = [cell(images, unmerged, clean.part) for images in found.values()]
        print(f"| {clean.label} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
