"""Call a pipeline: jobs in, images out; images as PNG."""

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
    """Call the pipeline once, and return an RGB image for each job.

    Args:
        model: the model.
        settings: how images are sampled.
        jobs: the jobs.
        on_step: called with the numbers of steps done and in all, if the pipeline reports them.

    Raises:
        UserError: the pipeline does not take an argument.
        MachineError: pixels are not finite (16-bit overflow), or there is not enough memory.
    """
    call = _arguments(model, settings, jobs)
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


def _arguments(
    model: LoadedModel, settings: GenerateSettings, jobs: Sequence[Job]
) -> dict[str, Any]:
    """Return the arguments of the pipeline's call, or raise UserError if it ignores one of them."""
    steered, kind = any(job.steered for job in jobs), type(model.pipe).__name__
    argument, _ = guidance_of(model.pipe)
    call: dict[str, Any] = {
        "prompt": [job.prompt.text for job in jobs],
        "num_inference_steps": settings.steps,
        "generator": [generator_of(job) for job in jobs],
        "output_type": "np",
    }
    if steered:
        call["negative_prompt"] = [job.negative_prompt or "" for job in jobs]
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
            f"--negative-prompt: {kind} ignores it without true_cfg_scale; leave it out"
        )
    return call


def to_png(image: Image.Image, job: Job, described: dict[str, Any]) -> bytes:
    """Return an image as PNG, with text chunks ``prompt`` and ``mame_sd`` (settings as JSON).

    It doesn't depend on time, place or the rest of the batch.

    Args:
        image: the image.
        job: its job.
        described: settings of the run.
    """
    text = PngInfo()
    text.add_itxt("prompt", job.prompt.text.replace("\0", "\u2400"))  # PNG text has no zero bytes
    of_job = {
        "id": job.prompt.id,
        "repeat": job.repeat,
        "prompt": job.prompt.text,
        "seed": job.seed,
        "negative_prompt": job.negative_prompt,
    }
    settings = {key: value for key, value in described.items() if key != "prompts"}
    text.add_text("mame_sd", json.dumps({**settings, **of_job}, sort_keys=True))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=text)
    return buffer.getvalue()
