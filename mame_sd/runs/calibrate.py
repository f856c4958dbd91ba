"""The library's calibration of a loaded model, on prompts as `mame-sd generate` takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mame_sd.config import MaMeConfig
from mame_sd.diffusion.calibration import (
    FORMS,
    Calibration,
    Measurement,
    calibration_of,
    measure_image,
)
from mame_sd.errors import UserError
from mame_sd.runs.generate import environment
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.prompt_files import Prompt
from mame_sd.runs.sampling import merge_in, sample


def calibrate(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    settings: GenerateSettings,
    base: MaMeConfig,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Measure every form in every layer on images of `prompts`.

    Raises:
        UserError: a model that merging does not support, or in which nothing could merge.
    """
    jobs = jobs_of(prompts, settings)
    handle = merge_in(model, base)
    found = Measurement()
    try:
        for number, job in enumerate(jobs):
            run = partial(sample, model, settings, [job])
            found.add(measure_image(handle, run, number, len(jobs)))
            on_progress(number + 1, len(jobs))
        return calibration_of(handle, found, described(model, settings, len(jobs)))
    except ValueError as error:
        raise UserError(f"{error} (see --min-tokens, --size)") from error
    finally:
        handle.remove()


def check_forms(base: MaMeConfig) -> None:
    """Raises UserError where `base` allows no form that calibration tries."""
    try:
        for form in FORMS:
            base.replace(layers=None, **form)
    except ValueError as error:
        raise UserError(f"merging: {error}; calibrate tries shares to keep") from error


def described(model: LoadedModel, settings: GenerateSettings, prompts: int) -> dict[str, Any]:
    """What a file says of how its settings were found."""
    height, width = settings.height, settings.width
    if not height or not width:
        height, width = model.default_size
    identity = {
        name: model.identity[name] for name in ("name", "sha256", "dtype") if name in model.identity
    }
    guidance = model.guidance if settings.guidance is None else settings.guidance
    return {
        "model": identity,
        "steps": settings.steps,
        "size": [height, width],
        "guidance": guidance,
        "prompts": prompts,
        "library": environment(model),
    }
