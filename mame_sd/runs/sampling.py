"""One call of a pipeline: jobs in, images out; images as PNG."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from mame_sd.errors import MachineError, UserError, first_line
from mame_sd.runs.jobs import GenerateSettings, Job, generator_of
from mame_sd.runs.loading import LoadedModel, guidance_of


def sample(
    model: LoadedModel,
    settings: GenerateSettings,
    jobs: Sequence[Job],
    on_step: Callable[[int, int], None] | None = None,
) -> list[Image.Image]:
    """One call of the pipeline: an RGB image for each of `jobs`.

    Args:
        on_step: told (steps done, steps), where the pipeline reports them.

    Raises:
        UserError: an argument that the pipeline does not take, or refuses.
        MachineError: pixels that are no numbers (16-bit overflow), out of memory.
    """
    call = arguments_of(model, settings, jobs)
    if on_step is not None and "callback_on_step_end" in model.arguments:

        def tell(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            on_step(index + 1, len(pipe.scheduler.timesteps))
            return tensors

        call["callback_on_step_end"] = tell
    try:
        result = model.pipe(**call)
    except ValueError as error:  # the pipeline's own checks of its inputs
        raise UserError(
            f"{type(model.pipe).__name__} does not take these settings ({first_line(error)});"
            " change them"
        ) from error
    if not hasattr(result, "images"):
        raise UserError(
            f"--model {model.identity['name']}: expected a pipeline that makes images, got"
            f" {type(model.pipe).__name__}, which makes a {type(result).__name__}; give another"
            " model"
        )
    images = np.asarray(result.images)  # [B, H, W, 3] in [0, 1]
    if not np.isfinite(images).all():
        raise MachineError(
            f"prompt {jobs[0].prompt.id!r}: expected finite numbers for pixels, got others in"
            f" {model.identity['dtype']}; use --dtype float32 or bfloat16, or check the weights"
        )
    return [Image.fromarray(pixels) for pixels in (images * 255).round().astype(np.uint8)]


def arguments_of(
    model: LoadedModel, settings: GenerateSettings, jobs: Sequence[Job]
) -> dict[str, Any]:
    """What the pipeline is called with for `jobs`.

    Raises UserError for what it does not take, or takes no notice of.
    """
    steered, kind = any(job.steered for job in jobs), type(model.pipe).__name__
    call: dict[str, Any] = {
        "prompt": [job.prompt.text for job in jobs],
        "num_inference_steps": settings.steps,
        "generator": [generator_of(job) for job in jobs],
        "output_type": "np",
    }
    if steered:
        call["negative_prompt"] = [job.negative_prompt or "" for job in jobs]
    argument, _ = guidance_of(model.pipe)
    guidance = model.guidance if settings.guidance is None else settings.guidance
    if guidance is not None:
        call[argument] = guidance
    if settings.height is not None:
        call.update(height=settings.height, width=settings.width)
    for name in call:
        if name not in model.arguments:
            flag = "--guidance" if name == argument else "--" + name.replace("_", "-")
            raise UserError(f"{flag}: {kind} does not take this; leave it out")
    if argument == "true_cfg_scale":  # Qwen-Image
        if settings.guidance is not None and not steered:
            raise UserError(
                f"--guidance: {kind} guides away from a negative prompt alone; give"
                " --negative-prompt, too"
            )
    elif steered and "true_cfg_scale" in model.arguments:  # Flux, whose guidance is distilled
        raise UserError(
            f"--negative-prompt: {kind} takes no notice of one without true_cfg_scale; leave it out"
        )
    return call


def to_png(image: Image.Image, job: Job, described: dict[str, Any]) -> bytes:
    """The image as PNG, with text chunks ``prompt`` (plain) and ``mame_sd`` (JSON: settings, id,
    repeat, seed).

    Nothing in it depends on time, place or batch neighbours. A zero byte, which PNG text can't
    hold, becomes U+2400.
    """
    text = PngInfo()
    text.add_itxt("prompt", job.prompt.text.replace("\0", "\u2400"))
    own = {"id": job.prompt.id, "repeat": job.repeat, "prompt": job.prompt.text, "seed": job.seed}
    own["negative_prompt"] = job.negative_prompt
    settings = {key: value for key, value in described.items() if key != "prompts"}
    text.add_text("mame_sd", json.dumps({**settings, **own}, sort_keys=True))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=text)
    return buffer.getvalue()
