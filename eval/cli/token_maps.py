"""``mame-sd-eval token-maps``: draw how a vision transformer merges one image, block by block, each
merged group in one colour, as in the figures of the paper (arXiv 2604.13432).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mame_sd.cli.sheet import Cell, check_sheet_path, draw_sheet, write_sheet
from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.perception.apply_encoder import apply_encoder
from mame_sd.perception.known_encoders import find_encoder
from mame_sd.runs.model_files import ModelChoice

from ..images import load_image
from ..perception.encoders import LoadedEncoder, load_encoder

PANEL_SIDE, PANELS_ACROSS = 448, 4
_DARKER = 0.55  # what is left of the light on the border between two groups


@dataclass(frozen=True)
class TokenMap:
    """The image's patches after one block.

    Attributes:
        block: counted from 0.
        owners: [h, w], for each patch the one (row * w + column) that it went to over all blocks so
            far. That is its own place if it was kept.
    """

    block: int
    owners: np.ndarray

    @property
    def kept(self) -> int:
        """How many patches are left."""
        return len(np.unique(self.owners))


def run_token_maps(
    file: Path, blocks: str | None, out: Path, choice: ModelChoice, merging: MaMeConfig
) -> None:
    """Write the drawing and print how many patches are left.

    Raises UserError for options, an image or a model that won't do.
    """
    chosen = blocks_of(blocks)
    check_sheet_path(out)
    picture = load_image(file, convert=True)
    encoder = load_encoder(choice)
    seen, maps = token_maps(encoder, picture, merging, chosen)
    given = dict(merging.given) or "default"
    about = {"image": file.name, "model": encoder.identity, "mame": given, "blocks": blocks}
    write_sheet(out, draw_maps(seen, maps, file.name), about)
    for one in maps:
        print(f"block {one.block}: {one.kept} of {one.owners.size} patches left")
    print(out)


def blocks_of(text: str | None) -> int | tuple[int, ...] | None:
    """``8`` as a number of blocks, ``3,6,9`` or ``3,`` as these. Raises UserError for others."""
    if text is None:
        return None
    try:
        blocks = tuple(int(part) for part in text.removesuffix(",").split(","))
    except ValueError:
        raise UserError(
            f"--blocks: expected a number such as 8, or blocks such as 3,6,9, got {text!r};"
            " correct it"
        ) from None
    return blocks if "," in text else blocks[0]


@torch.no_grad()
def token_maps(
    encoder: LoadedEncoder,
    picture: np.ndarray,
    merging: MaMeConfig,
    blocks: int | tuple[int, ...] | None,
) -> tuple[Image.Image, list[TokenMap]]:
    """The image [H, W, 3] as the model sees it, and its patches after each block that merges.

    Raises UserError for settings that the model can't merge by, or patches that lie on no grid.
    """
    inputs = encoder.inputs([picture])
    model, _, known = find_encoder(encoder.model)
    pixels = inputs["pixel_values"]
    if pixels.dim() != 4 or not known.grid:
        raise UserError(
            "--model: expected a model that cuts the image into a grid, got"
            f" {type(model).__name__}; give another"
        )
    seen = pixels_seen(pixels[0], encoder.processor)
    try:
        handle = apply_encoder(model, merging, blocks=blocks)
    except ValueError as error:
        raise UserError(f"merging: {error}") from None
    maps = []
    try:
        handle.capture()
        model(pixel_values=pixels)
        prefix = handle.num_prefix_tokens
        for block in sorted(handle.plans()):
            owners = handle.owners(block)[0, prefix:].cpu().numpy() - prefix
            maps.append(TokenMap(block, owners.reshape(grid_like(seen, len(owners)))))
    finally:
        handle.remove()
    if not maps:
        raise UserError(
            "expected blocks that merge, but none had enough patches; lower --min-tokens"
        )
    return seen, maps


def pixels_seen(pixels: torch.Tensor, processor: Any) -> Image.Image:
    """The image that `processor` made `pixels` [3, H, W] of, resized and cropped."""
    values = pixels.float().cpu().permute(1, 2, 0)
    if getattr(processor, "do_normalize", False):
        values = values * torch.tensor(processor.image_std) + torch.tensor(processor.image_mean)
    return Image.fromarray((values * 255).round().clamp(0, 255).byte().numpy())


def draw_maps(seen: Image.Image, maps: list[TokenMap], name: str) -> Image.Image:
    """The image, then it after each block."""
    factor = max(1, PANEL_SIDE // max(seen.size))
    large = seen.resize((seen.width * factor, seen.height * factor), Image.Resampling.LANCZOS)
    cells = [Cell(large, (name, f"{maps[0].owners.size} patches"))]
    for one in maps:
        lines = f"block {one.block}", f"{one.kept} patches left"
        cells.append(Cell(mean_colors(large, one.owners), lines))
    starts = range(0, len(cells), PANELS_ACROSS)
    return draw_sheet([cells[start : start + PANELS_ACROSS] for start in starts])


def mean_colors(image: Image.Image, owners: np.ndarray) -> Image.Image:
    """Every group in the mean colour of its pixels, borders between groups darker."""
    positions = Image.fromarray(owners.astype(np.int32))
    groups = np.asarray(positions.resize(image.size, Image.Resampling.NEAREST))
    values = np.asarray(image, np.float64)
    counts = np.bincount(groups.ravel(), minlength=owners.size)
    sums = [
        np.bincount(groups.ravel(), values[..., channel].ravel(), owners.size)
        for channel in range(3)
    ]
    drawn = (np.stack(sums, -1) / np.maximum(counts, 1)[:, None])[groups]
    border = np.zeros(groups.shape, bool)
    border[1:] |= groups[1:] != groups[:-1]
    border[:, 1:] |= groups[:, 1:] != groups[:, :-1]
    drawn[border] *= _DARKER
    return Image.fromarray(np.rint(drawn).astype(np.uint8))


def grid_like(image: Image.Image, tokens: int) -> tuple[int, int]:
    """(h, w) of `tokens` tokens in the image's proportions. Raises UserError when they fit none."""
    height = round((tokens * image.height / image.width) ** 0.5)
    if height < 1 or tokens % height:
        raise UserError(
            f"expected tokens that lie on a grid, got {tokens} for {image.width} x {image.height}"
            " pixels; choose another model"
        )
    return height, tokens // height
