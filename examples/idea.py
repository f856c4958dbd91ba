"""The idea in pictures: join the similar tokens of an image into groups, and show each group as its
mean.

    python examples/idea.py [IMAGE] [OUT]    # default: the packaged picture, to idea.webp

Tokens are patches of 8 x 8 pixels. Below stands what a group of 2 x 2 patches, averaged without a
look at them, leaves at the same number of tokens.
"""

import sys
from importlib.resources import files

import numpy as np
import torch
from PIL import Image, ImageDraw

from mame_sd.core.groups import group_tokens, make_cells

SIDE, PATCH = 256, 8
GRID = SIDE // PATCH  # tokens along a side


def tokens(pixels: torch.Tensor) -> torch.Tensor:  # [3, H, W] -> [1, L, 3 * PATCH^2]
    return torch.nn.functional.unfold(pixels[None], PATCH, stride=PATCH).transpose(1, 2)


def picture(x: torch.Tensor, label: str) -> Image.Image:  # [1, L, 3 * PATCH^2] -> with its label
    pixels = torch.nn.functional.fold(x.transpose(1, 2), SIDE, PATCH, stride=PATCH)[0]
    shown = Image.new("RGB", (SIDE + 8, SIDE + 24), "white")
    shown.paste(Image.fromarray((pixels * 255).byte().permute(1, 2, 0).numpy()), (4, 20))
    ImageDraw.Draw(shown).text((4, 4), label, fill="black")
    return shown


source = sys.argv[1] if len(sys.argv) > 1 else str(files("mame_sd.prompts") / "demo.png")
image = Image.open(source).convert("RGB").resize((SIDE, SIDE))
x = tokens(torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255)
panels = [picture(x, f"all {x.shape[1]} tokens")]
for keep in (0.5, 0.25, 0.125):
    cells = make_cells((GRID, GRID), keep)
    groups = group_tokens(x.index_select(1, cells.order), cells)
    means = groups.restore(groups.merge(x))  # merged keys and values are such means
    error = (means - x).square().mean().sqrt().item()
    panels.append(picture(means, f"{groups.tokens_kept} tokens, error {error:.3f}"))
cells = x.view(1, GRID // 2, 2, GRID // 2, 2, -1).mean((2, 4), keepdim=True)
blind = cells.expand(1, GRID // 2, 2, GRID // 2, 2, -1).reshape(x.shape)
error = (blind - x).square().mean().sqrt().item()
panels.append(picture(blind, f"{x.shape[1] // 4} by position, error {error:.3f}"))
sheet = Image.new("RGB", (sum(panel.width for panel in panels), panels[0].height), "white")
for place, panel in enumerate(panels):
    sheet.paste(panel, (place * panel.width, 0))
sheet.save(sys.argv[2] if len(sys.argv) > 2 else "idea.webp", quality=85)
