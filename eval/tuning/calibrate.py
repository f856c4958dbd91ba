"""Calibration of a loaded model on a few prompts, which goes on where it stopped; and the settings
that are checked then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
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
from mame_sd.runs.files import check_place, write_atomically
from mame_sd.runs.generate import environment
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.prompt_files import Prompt
from mame_sd.runs.sampling import merge_in, sample

CALIBRATED = "calibrated.json"
# How many times as fast the denoiser is to be, for a wish of nearness; those that merging can't
# give here are left out.
SPEEDS = (1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0)
# Beyond a wished speed, as shares of what it gains: the whole pipeline gains less than its
# denoiser.
BEYOND = (1.0, 1.2, 1.5)
UNIFORM = "default"


def calibrate(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    settings: GenerateSettings,
    base: MaMeConfig,
    out: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Measure every form in every layer on images of `prompts`.

    What is done stands in `out`/calibrated.json.

    Raises:
        UserError: a model that merging does not support, or in which nothing could merge.
        MachineError: the disk, memory.
    """
    check_place(out, out)
    jobs = jobs_of(prompts, settings)
    about = digest(["calibration", asdict(settings), base.to_dict(), FORMS, len(jobs)], model)
    file = out / CALIBRATED
    rows = read_rows(file, about)
    on_progress(sum(job.name in rows for job in jobs), len(jobs))
    handle = merge_in(model, base)
    try:
        for number, job in enumerate(jobs):
            if job.name not in rows:
                run = partial(sample, model, settings, [job])
                rows[job.name] = measure_image(handle, run, number, len(jobs)).to_dict()
                write_atomically(file, json.dumps({"about": about, "rows": rows}).encode())
            on_progress(sum(job.name in rows for job in jobs), len(jobs))
        found = Measurement()
        for job in jobs:
            found.add(Measurement.from_dict(rows[job.name]))
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
        raise UserError(f"merging: {error}; tune tries shares to keep") from error


def settings_to_check(
    calibration: Calibration, base: MaMeConfig, speed: float | None
) -> list[tuple[str, MaMeConfig]]:
    """What is to be measured on whole images: uniform shares as they are without calibration, and
    settings by layer.

    Args:
        base: the uniform shares.
        speed: that is wished for; None: nearness is, and settings of many speeds are measured.
    """
    wanted = SPEEDS if speed is None else tuple(1 + share * (speed - 1) for share in BEYOND)
    speeds = [s for s in wanted if s <= calibration.fastest]
    if len(speeds) < len(wanted):
        speeds.append(calibration.fastest * 0.999)
    rows = [(UNIFORM, base)]
    for wish in speeds:
        if wish <= 1:  # merging is reckoned to save nothing on this machine
            continue
        config = calibration.config(wish)
        if all(config != known for _, known in rows):
            rows.append((f"by layer, {wish:.2f}", config))
    return rows


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
        "calibrated_on_prompts": prompts,
        "library": environment(model),
    }


def digest(settings: list[Any], model: LoadedModel) -> str:
    """Tells measurements of other settings, models and machines apart."""
    about = json.dumps([settings, model.identity, environment(model)], sort_keys=True, default=str)
    return hashlib.sha256(about.encode()).hexdigest()


def read_rows(path: Path, about: str) -> dict[str, Any]:
    """Rows of an earlier call with the same settings on the same machine; none otherwise."""
    try:
        found = json.loads(path.read_bytes())
        return dict(found["rows"]) if found["about"] == about else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
