"""Draw which tokens were merged into which, over the image: a group is a destination and the
sources that mainly went to it. It is painted in its mean colour, with an outline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from mame_sd.cli.sheet import Cell, draw_sheet
from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.prompt_files import Prompt, prompts_from_texts
from mame_sd.runs.sampling import STEP_END, levels_of, merge_in, sample

PANEL_SIDE = 768
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
    layer: str | None = None,
) -> MergeMap:
    """Generate one image and keep how a layer merged at `step`.

    Args:
        step: a call of the denoiser, from 1; Heun's steps are two calls each.
        layer: a layer's name, or a part of it that only one layer has; None: the first of those
            with the most tokens that merged.

    Raises:
        UserError: no such step or layer, or a pipeline without step callbacks.
    """
    if not 1 <= step <= settings.steps:
        raise UserError(
            f"--step: expected 1 to {settings.steps} (--steps), got {step}; give one of these"
        )
    if STEP_END not in model.arguments:
        raise UserError(
            f"expected a pipeline that reports its steps, but {type(model.pipe).__name__} does not;"
            " use another model"
        )
    (job,) = jobs_of([prompt_to_draw(prompt)], settings)
    handle = merge_in(model, config)
    plans: dict[str, Any] = {}

    def keep_plans(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if index == step - 1:
            plans.update(handle.plans())
        return tensors

    try:
        handle.capture()
        (image,) = sample(model, settings, [job], callback_on_step_end=keep_plans)
        levels_of(handle)  # raises when nothing merged
        merged = [found for found in handle.report().layers if found.name in plans]
    finally:
        handle.remove()
    chosen = min(merged, key=lambda found: found.level) if layer is None else _named(merged, layer)
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


def draw_merge(found: MergeMap, prompt: str) -> Image.Image:
    """The image and, beside it, the image under its groups' colours."""
    factor = max(1, PANEL_SIDE // max(found.image.size))
    size = found.image.width * factor, found.image.height * factor
    plain = found.image.resize(size, Image.Resampling.LANCZOS)
    kept = f"{found.tokens_kept} of {found.owners.size} tokens kept"
    legend = (
        f"{found.layer}, step {found.step}",
        f"{kept}; each group in its mean colour, outlined",
    )
    return draw_sheet([[Cell(plain, (prompt,)), Cell(mean_colors(plain, found.owners), legend)]])


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


def _named(merged: list[Any], name: str) -> Any:
    """The report of the layer of that name, or of a name that holds it."""
    found = [layer for layer in merged if layer.name == name]
    found = found or [layer for layer in merged if name in layer.name]
    if len(found) != 1:
        raise UserError(
            f"--layer: expected a part of one layer's name, but {name!r} fits {len(found)} of"
            f" those that merge ({', '.join(layer.name for layer in merged)}); give one of these"
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
