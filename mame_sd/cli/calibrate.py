"""``mame-sd calibrate``: find settings by block on a few prompts, and write them to a file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from mame_sd.cli.console import answer, note, progress
from mame_sd.cli.generate import load
from mame_sd.config import MaMeConfig
from mame_sd.diffusion.calibration import FORMS, Measurement, calibrated, measure
from mame_sd.errors import UserError
from mame_sd.json_files import read_object
from mame_sd.runs.files import write_atomically
from mame_sd.runs.generate import environment
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.loading import known_identity
from mame_sd.runs.merging import Merging
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.prompt_files import Prompt, prompts_digest
from mame_sd.runs.run_folder import differences, in_short
from mame_sd.runs.sampling import sample

SETTINGS, MEASURED = "config.json", "measured.json"
MOST = 4  # prompts: more hardly change what is chosen


def run_calibrate(
    speed: float,
    out: Path,
    prompts: Sequence[Prompt],
    choice: ModelChoice,
    settings: GenerateSettings,
    base: MaMeConfig,
) -> None:
    """Write `out`/config.json, the settings by block for `speed`, and print them.

    `out`/measured.json keeps what was measured, so that a stopped call continues with the next
    prompt, and another speed takes no new measurement.

    Args:
        speed: how many times as fast the denoiser is to be.
        out: the folder.
        prompts: the prompts, of which the first `MOST` are used.
        choice: the model.
        settings: how images are sampled.
        base: settings that calibration doesn't choose.

    Raises:
        UserError: `out` has files of another model, the model is not supported, nothing could
            merge, or merging can't reach `speed`.
    """
    _check(out, choice)
    if len(prompts) > MOST:
        note(f"calibrating on the first {MOST} of {len(prompts)} prompts")
    prompts = prompts[:MOST]
    model = load(choice)
    handle, file = Merging(base).install(model).handle, out / MEASURED
    about = {
        "model": model.identity,
        "library": environment(model.pipe.device),
        "prompts": {"count": len(prompts), "sha256": prompts_digest(prompts)},
        **asdict(settings),
    }
    made_with = {**about, "described": handle.described, "base": base.to_dict(), "forms": FORMS}
    there = read_object(file, "an earlier calibration") if file.exists() else {"about": {}}
    same = not differences(there.pop("about"), made_with)
    measurement = Measurement(**there) if same else Measurement()
    jobs = jobs_of(prompts, settings)
    try:
        with progress("prompts") as on_progress:
            for job in jobs[measurement.images :]:
                on_progress(measurement.images, len(jobs))
                measure(handle, partial(sample, model, settings, [job]), measurement)
                text = json.dumps({"about": made_with, **asdict(measurement)})
                write_atomically(file, text.encode())
    except ValueError as error:
        raise UserError(f"{error} (see --min-tokens, --height and --width)") from error
    calibration = calibrated(handle, measurement, about)
    try:
        text = calibration.text(speed)
    except ValueError as error:
        raise UserError(f"--{error}") from None
    config = out / SETTINGS
    write_atomically(config, text.encode())
    again = f"mame-sd compare 'a prompt' --config {config}, or apply_mame(pipe, {str(config)!r})"
    answer(f"{calibration.table(speed)}\n{config}", {"config": str(config), "speed": speed}, again)


def _check(out: Path, choice: ModelChoice) -> None:
    """Raise UserError if `out` holds files of another model or of no calibration."""
    for file in (out / SETTINGS, out / MEASURED):
        if not os.path.lexists(file):
            continue
        try:
            there = read_object(file, "an earlier calibration")["about"]["model"]
            different = differences(there, known_identity(choice), partly=True, name="model")
        except (LookupError, TypeError, ValueError):
            different = ["values of another kind"]
        if different:
            raise UserError(
                f"--out {out}: expected a new folder, or one of an earlier calibration of this"
                f" model, got {file.name} with {in_short(different)}; choose another"
            )
