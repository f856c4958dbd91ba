"""Draw which tokens were merged into which, over the image.

A group is a destination and the sources that mainly went to it. It is painted in its mean colour,
with an outline, or in a colour of its own as in the paper's figures. There a dot marks each
destination that others joined.
"""

from __future__ import annotations

import colorsys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from mame_sd.cli.sheet import Cell, draw_sheet
from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.prompt_files import Prompt, prompts_from_texts
from mame_sd.runs.sampling import levels_of, merge_in, sample

PANEL_SIDE = 768
COLORS = ("mean", "distinct")
LEGENDS = {
    "mean": "each group in its mean colour, outlined",
    "distinct": "a colour is a group, a dot its destination, clear tokens are alone",
}
_OPACITY = 0.6
_DARKER = 0.55  # what is left of the light on the border between two groups


@dataclass(frozen=True)
class MergeMap:
    """The merging of one layer at one step.

    Attributes:
        image: the finished image.
        owners: [h, w], for each token the position (row * w + column) that it mainly went to, its
            own if it was kept.
        layer: name of the layer.
        step: counted from 1.
        tokens_kept: in this layer and step.
    """

    image: Image.Image
    owners: np.ndarray
    layer: str
    step: int
    tokens_kept: int


def capture_merge(
    model: LoadedModel,
    prompt: str,
    settings: GenerateSettings,
    config: MaMeConfig,
    step: int,
    level: int = 0,
    layer: str | None = None,
) -> MergeMap:
    """Generate one image and keep how a layer merged at `step`.

    Args:
        step: a step of the scheduler, from 1; where it evaluates the model more than once (Heun),
            the first of them.
        level: 0 is the level with the most tokens; its first layer that merged is taken.
        layer: a layer's name, or a part of it that only one layer has, instead of `level`.

    Raises:
        UserError: no such step, level or layer, or a pipeline without step callbacks.
    """
    if not 1 <= step <= settings.steps:
        raise UserError(
            f"--step: expected 1 to {settings.steps} (--steps), got {step}; give one of these"
        )
    if "callback_on_step_end" not in model.arguments:
        raise UserError(
            f"expected a pipeline that reports its steps, but {type(model.pipe).__name__} does not;"
            " use another model"
        )
    (job,) = jobs_of([prompt_to_draw(prompt)], settings)
    handle = merge_in(model, config)
    plans: dict[str, Any] = {}

    def keep_plans(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if index == first_evaluation(
            step, settings.steps, len(pipe.scheduler.timesteps), pipe.scheduler.order
        ):
            plans.update(handle.plans())
        return tensors

    try:
        handle.capture()
        (image,) = sample(model, settings, [job], callback_on_step_end=keep_plans)
        levels_of(handle)  # raises when nothing merged
        chosen = _choose(handle.report().layers, plans, level, layer)
    finally:
        handle.remove()
    plan = plans[chosen.name]
    owners = owners_of(plan)
    height, width = chosen.size or grid_like(image, len(owners))
    return MergeMap(image, owners.reshape(height, width), chosen.name, step, plan.tokens_kept)


def owners_of(plan: Any) -> np.ndarray:
    """The token that each one of a plan's last sample went to [L], itself where it was kept.

    The last sample is the one with the prompt, under guidance too.
    """
    kept = plan.kept if plan.kept.dim() == 1 else plan.kept[-1]
    return np.asarray(kept[plan.groups[-1]].cpu())


def prompt_to_draw(text: str) -> Prompt:
    """The prompt of `capture_merge`, whose id decides the noise.

    Raises UserError for an empty one.
    """
    (prompt,) = prompts_from_texts([text])
    return replace(prompt, id="show-merge")


def first_evaluation(step: int, steps: int, evaluations: int, order: int) -> int:
    """The place, from 0, among all `evaluations` of the model where `step` (from 1) of `steps`
    begins.

    `order` evaluations make a step; the last step may have fewer (Heun: 2 steps are 3 evaluations).
    Those beyond steps * order belong to the first step (PNDM warms up, so 2 steps are 3 evaluations
    as well).

    >>> [first_evaluation(step, 3, 5, order=2) for step in (1, 2, 3)]
    [0, 2, 4]
    >>> [first_evaluation(step, 3, 4, order=1) for step in (1, 2, 3)]
    [0, 2, 3]
    """
    return 0 if step == 1 else max(0, evaluations - steps * order) + (step - 1) * order


def check_colors(colors: str | None) -> None:
    """Raise UserError for colours that there are none of."""
    if colors is not None and colors not in COLORS:
        raise UserError(
            f"--colors: expected {' or '.join(COLORS)}, got {colors!r}; give one of these"
        )


def draw_merge(found: MergeMap, prompt: str, colors: str = "mean") -> Image.Image:
    """The image and, beside it, the image under its groups' colours."""
    factor = max(1, PANEL_SIDE // max(found.image.size))
    size = found.image.width * factor, found.image.height * factor
    plain = found.image.resize(size, Image.Resampling.LANCZOS)
    total = found.owners.size
    legend = (
        f"{found.layer}, step {found.step}",
        f"{found.tokens_kept} of {total} tokens kept; {LEGENDS[colors]}"
        + (", dark ones dropped" if (found.owners < 0).any() else ""),
    )
    return draw_sheet(
        [[Cell(plain, (prompt,)), Cell(PAINTERS[colors](plain, found.owners), legend)]]
    )


def mean_colors(image: Image.Image, owners: np.ndarray) -> Image.Image:
    """Every group in the mean colour of its pixels, borders between groups darker, dropped tokens
    black.
    """
    positions = np.where(owners < 0, owners.size, owners)
    size = image.width, image.height
    groups = np.asarray(
        Image.fromarray(positions.astype(np.int32)).resize(size, Image.Resampling.NEAREST)
    )
    values = np.asarray(image, np.float64)
    counts = np.bincount(groups.ravel(), minlength=owners.size + 1)
    sums = [
        np.bincount(groups.ravel(), values[..., channel].ravel(), owners.size + 1)
        for channel in range(3)
    ]
    means = np.stack(sums, -1) / np.maximum(counts, 1)[:, None]
    means[-1] = 0
    drawn = means[groups]
    border = np.zeros(groups.shape, bool)
    border[1:] |= groups[1:] != groups[:-1]
    border[:, 1:] |= groups[:, 1:] != groups[:, :-1]
    drawn[border] *= _DARKER
    return Image.fromarray(np.rint(drawn).astype(np.uint8))


def overlay(image: Image.Image, owners: np.ndarray) -> Image.Image:
    """`image` with every group of two or more tokens in a colour of its own, and dropped tokens
    dark.
    """
    rows, columns = owners.shape
    dropped = owners.reshape(-1) < 0
    flat = np.where(dropped, np.arange(dropped.size), owners.reshape(-1))
    sizes = np.bincount(
        flat, minlength=flat.size
    )  # [L], tokens of each group, at its owner's position
    colours = np.array([_colour(position) for position in range(flat.size)], np.uint8)  # [L, 3]
    grouped = sizes[flat] > 1
    colours[dropped] = 0
    cells = colours[flat].reshape(rows, columns, 3)
    alpha = ((grouped | dropped).reshape(rows, columns) * round(255 * _OPACITY)).astype(np.uint8)
    colour_layer = Image.fromarray(cells).resize(image.size, Image.Resampling.NEAREST)
    result = Image.composite(
        colour_layer, image, Image.fromarray(alpha).resize(image.size, Image.Resampling.NEAREST)
    )
    draw = ImageDraw.Draw(result)
    cell_width, cell_height = image.width / columns, image.height / rows
    radius = max(1.0, min(cell_width, cell_height) / 6)
    for position in np.flatnonzero((flat == np.arange(flat.size)) & grouped):
        x, y = (position % columns + 0.5) * cell_width, (position // columns + 0.5) * cell_height
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=(0, 0, 0))
    return result


def _colour(position: int) -> tuple[int, int, int]:
    """A colour for a group; neighbours in numbering are far apart in hue (golden ratio)."""
    hue, value = position * 0.618033988749895 % 1.0, 0.75 + 0.25 * (position * 0.754877666 % 1.0)
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def _choose(layers: Any, plans: dict[str, Any], level: int, name: str | None) -> Any:
    """The report of the layer to draw."""
    merged = [layer for layer in layers if layer.name in plans]
    if name is not None:
        found = [layer for layer in merged if layer.name == name] or [
            layer for layer in merged if name in layer.name
        ]
        if len(found) != 1:
            raise UserError(
                f"--layer: expected a part of one layer's name, but {name!r} fits {len(found)} of"
                f" those that merge ({', '.join(layer.name for layer in merged)}); give one of"
                " these"
            )
        return found[0]
    found = [layer for layer in merged if layer.level == level]
    if not found:
        there = sorted({layer.level for layer in merged})
        raise UserError(
            f"--level: expected a level that merges ({', '.join(map(str, there))}), got {level};"
            " lower --min-tokens for more"
        )
    return found[0]


def grid_like(image: Image.Image, tokens: int) -> tuple[int, int]:
    """(h, w) of `tokens` tokens in the image's proportions. Raises UserError when they fit none."""
    height = round((tokens * image.height / image.width) ** 0.5)
    if height < 1 or tokens % height:
        raise UserError(
            f"expected tokens that lie on a grid, got {tokens} for {image.width} x {image.height}"
            " pixels; choose another layer or model"
        )
    return height, tokens // height


PAINTERS = {"mean": mean_colors, "distinct": overlay}
