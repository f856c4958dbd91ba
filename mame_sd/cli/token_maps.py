"""Draw how a vision transformer merges one image or clip, block by block: each merged group one
colour, as in the paper's figures. A clip's frames stand side by side, one for each tubelet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mame_sd.cli.sheet import Cell, check_sheet_path, draw_sheet, write_sheet
from mame_sd.cli.show_merge import COLORS, PAINTERS, check_colors, grid_like
from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.perception.apply_encoder import apply_encoder
from mame_sd.perception.known_encoders import find_encoder
from mame_sd.runs.encoders import LoadedEncoder, load_encoder
from mame_sd.runs.frames import SUFFIXES, as_shown, evenly, frames_in
from mame_sd.runs.model_files import ModelChoice

PANEL_SIDE, PANELS_ACROSS = 448, 4


@dataclass(frozen=True)
class TokenMap:
    """The image's patches after one block.

    Attributes:
        block: counted from 0.
        owners: [h, w], for each patch the one (row * w + column) that it went to over all blocks so
            far. That is its own place if it was kept. Of a clip w counts the columns of all frames.
        elsewhere: of a clip the share of what merged that went to another tubelet.
    """

    block: int
    owners: np.ndarray
    elsewhere: float | None = None

    @property
    def kept(self) -> int:
        """How many patches are left."""
        return len(np.unique(self.owners))


def show_image(
    file: Path,
    blocks: str | None,
    colors: str | None,
    out: Path,
    choice: ModelChoice,
    merging: MaMeConfig,
) -> None:
    """The body of ``show-merge IMAGE``: write the drawing and print how many patches are left.

    Raises UserError for options, an image or a model that won't do.
    """
    check_colors(colors)
    chosen = blocks_of(blocks)
    check_sheet_path(out)
    if file.is_dir():
        encoder = load_encoder(choice)
        seen, maps = clip_maps(encoder, read_frames(file, encoder), merging, chosen)
    else:
        picture = read_image(file)
        encoder = load_encoder(choice)
        seen, maps = token_maps(encoder, picture, merging, chosen)
    about = {
        "image": file.name,
        "model": encoder.identity,
        "mame": dict(merging.given) or "default",
        "blocks": blocks,
    }
    write_sheet(out, draw_maps(seen, maps, colors or COLORS[0], file.name), about)
    for one in maps:
        line = f"block {one.block}: {one.kept} of {one.owners.size} patches left"
        if one.elsewhere is not None:
            line += f", {one.elsewhere:.0%} of the others in another tubelet"
        print(line)
    print(out)


def blocks_of(text: str | None) -> int | tuple[int, ...] | None:
    """``8`` as a number of blocks, ``3,6,9`` as these blocks. Raises UserError for anything else.

    >>> blocks_of("8"), blocks_of("3,6,9"), blocks_of("3,"), blocks_of(None)
    (8, (3, 6, 9), (3,), None)
    """
    if text is None:
        return None
    try:
        numbers = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        numbers = ()
    if not numbers:
        raise UserError(
            f"--blocks: expected a number such as 8, or blocks such as 3,6,9, got {text!r};"
            " correct it"
        )
    return numbers if "," in text else numbers[0]


def read_image(file: Path) -> Image.Image:
    """The image of `file` in RGB, as viewers show it. Raises UserError where it can't be read."""
    try:
        with Image.open(file) as image:
            return as_shown(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(
            f"show-merge {file}: expected an image, but it can't be read ({error}); give another"
        ) from None


def read_frames(folder: Path, encoder: LoadedEncoder) -> np.ndarray:
    """The frames in `folder` in the order of the numbers in their names, as many as `encoder` sees,
    evenly spaced: uint8 [frames, H, W, 3].

    Raises UserError for a model of images, or frames that can't be read or differ in size.
    """
    if encoder.frames is None:
        raise UserError(
            f"show-merge {folder}: expected a model of clips for a folder of frames, got"
            f" {type(encoder.model).__name__}; give an image, or --model embedded-video"
        )
    files = frames_in(folder)
    if not files:
        raise UserError(
            f"show-merge {folder}: expected frames ({', '.join(SUFFIXES)}), found none; give a"
            " clip's folder"
        )
    chosen = evenly(len(files), encoder.frames)
    frames = [np.asarray(read_image(files[number])) for number in chosen]
    if len({frame.shape for frame in frames}) > 1:
        raise UserError(f"show-merge {folder}: expected frames of one size, got several")
    return np.stack(frames)


@torch.no_grad()
def clip_maps(
    encoder: LoadedEncoder,
    clip: np.ndarray,
    merging: MaMeConfig,
    blocks: int | tuple[int, ...] | None,
) -> tuple[Image.Image, list[TokenMap]]:
    """The first frame of each tubelet as the model sees it, side by side, and their patches after
    each block that merges.

    Raises UserError for settings that the model can't merge by.
    """
    pixels = encoder.inputs([clip])["pixel_values"]  # [1, frames, 3, H, W]
    tubelet = int(encoder.model.config.tubelet_size)
    shown = [pixels_seen(frame, encoder.processor) for frame in pixels[0, ::tubelet]]
    seen = Image.fromarray(np.concatenate([np.asarray(frame) for frame in shown], 1))
    maps = []
    for block, flat in _owners(encoder.model, pixels, merging, blocks):
        h, w = grid_like(shown[0], len(flat) // len(shown))
        frame, row, column = np.unravel_index(flat, (len(shown), h, w))
        place = row * (w * len(shown)) + frame * w + column
        owners = place.reshape(len(shown), h, w).transpose(1, 0, 2).reshape(h, -1)
        own = np.arange(len(flat))
        elsewhere = frame != own // (h * w)
        merged = max(1, int((flat != own).sum()))
        maps.append(TokenMap(block, owners, float(elsewhere.sum() / merged)))
    return seen, maps


@torch.no_grad()
def token_maps(
    encoder: LoadedEncoder,
    picture: Image.Image,
    merging: MaMeConfig,
    blocks: int | tuple[int, ...] | None,
) -> tuple[Image.Image, list[TokenMap]]:
    """The image as the model sees it, and its patches after each block that merges.

    Raises UserError for settings that the model can't merge by, or patches that lie on no grid.
    """
    inputs = encoder.inputs([np.asarray(picture)])
    model, _, known = find_encoder(encoder.model)
    pixels = inputs["pixel_values"]
    if pixels.dim() != 4 or not known.grid:
        raise UserError(
            "--model: expected a model that cuts the image into a grid, got"
            f" {type(model).__name__}; give another"
        )
    seen = pixels_seen(pixels[0], encoder.processor)
    return seen, [
        TokenMap(block, owners.reshape(grid_like(seen, len(owners))))
        for block, owners in _owners(model, pixels, merging, blocks)
    ]


def _owners(
    model: torch.nn.Module,
    pixels: torch.Tensor,
    merging: MaMeConfig,
    blocks: int | tuple[int, ...] | None,
) -> list[tuple[int, np.ndarray]]:
    """Each block that merges, and which patch each one went to by then [patches]."""
    try:
        handle = apply_encoder(model, merging, blocks=blocks)
    except ValueError as error:
        raise UserError(f"merging: {error}") from None
    try:
        handle.capture()
        model(pixel_values=pixels)
        prefix = handle.num_prefix_tokens
        found = [
            (block, handle.owners(block)[0, prefix:].cpu().numpy() - prefix)
            for block in sorted(handle.plans())
        ]
    finally:
        handle.remove()
    if not found:
        raise UserError(
            "expected blocks that merge, but none had enough patches; lower --min-tokens"
        )
    return found


def pixels_seen(pixels: torch.Tensor, processor: Any) -> Image.Image:
    """The image that `processor` made `pixels` [3, H, W] of, resized and cropped."""
    values = pixels.float().cpu().permute(1, 2, 0)
    if getattr(processor, "do_normalize", False):
        values = values * torch.tensor(processor.image_std) + torch.tensor(processor.image_mean)
    return Image.fromarray((values * 255).round().clamp(0, 255).byte().numpy())


def draw_maps(seen: Image.Image, maps: list[TokenMap], colors: str, name: str) -> Image.Image:
    """The image, then it after each block."""
    factor = max(1, PANEL_SIDE // max(min(seen.size), max(seen.size) // 2))
    large = seen.resize((seen.width * factor, seen.height * factor), Image.Resampling.LANCZOS)
    wide = seen.width > 2 * seen.height  # frames side by side
    across = 1 if wide else PANELS_ACROSS
    draw = PAINTERS[colors]
    cells = [Cell(large, (name, f"{maps[0].owners.size} patches"))]
    for one in maps:
        cells.append(
            Cell(draw(large, one.owners), (f"block {one.block}", f"{one.kept} patches left"))
        )
    return draw_sheet([cells[start : start + across] for start in range(0, len(cells), across)])
