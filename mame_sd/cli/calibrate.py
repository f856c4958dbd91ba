"""``mame-sd calibrate``: find settings by block on a few prompts, and check them on others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mame_sd.cli.compare import Way, compare, summary
from mame_sd.cli.console import answer, note, progress
from mame_sd.cli.generate import load_to_merge
from mame_sd.config import MaMeConfig
from mame_sd.diffusion.calibration import (
    Calibration,
    measure_images,
    read_measurement,
)
from mame_sd.diffusion.saved_setting import uniform
from mame_sd.errors import UserError
from mame_sd.report import counted
from mame_sd.runs.files import write_atomically
from mame_sd.runs.generate import environment
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.loading import LoadedModel, known_identity
from mame_sd.runs.merging import Merging
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.prompt_files import Prompt, prompts_digest
from mame_sd.runs.records import RECORD_ERRORS
from mame_sd.runs.run_folder import differences, in_short
from mame_sd.runs.sampling import sample

MEASURED = "measured.json"


def run_calibrate(
    speed: float,
    out: Path,
    prompts: Sequence[Prompt],
    choice: ModelChoice,
    settings: GenerateSettings,
    base: MaMeConfig,
) -> None:
    """Write `out`/config.json, the settings by block for `speed`, and print what they do.

    A quarter of the prompts, four at most, calibrate. On the others the settings are compared with
    those that hold for all blocks alike, and with one step fewer. `out`/measured.json keeps what
    was measured, so that a stopped call continues, and another speed takes no new measurement.

    Raises:
        UserError: a model that merging does not support, nothing that could merge, more speed than
            merging gives.
    """
    file = out / "config.json"
    _check(choice, out, file)
    model, base = load_to_merge(choice, base, prompts)
    few = min(4, max(1, len(prompts) // 4))
    found = _measured(model, prompts[:few], settings, base, out)
    try:
        config = found.config(speed)
    except ValueError as error:
        raise UserError(f"--{error}") from None
    checked, which = prompts[few:], "other prompt"
    if not checked:
        note("one prompt calibrates and checks, which flatters the settings; give more")
        checked, which = prompts, "prompt"
    ways = [Way("by block", config), Way("uniform", uniform(base))]
    if settings.steps > 1:
        ways.append(Way("one step fewer", fewer=1))
    with progress("prompts") as on_progress:
        panels = []
        for number, prompt in enumerate(checked):
            on_progress(number, len(checked))
            panels.append(compare(model, prompt, settings, ways))
    found_of = summary(panels)
    measured = {
        way.label: {name: found_of[way.label][name] for name in ("times_as_fast", "psnr")}
        for way in ways
    }
    lines = [
        f"{label}: {row['times_as_fast']:.2f} times as fast, PSNR {row['psnr']:.1f} dB"
        f" (of whole images, {counted(len(checked), which)})"
        for label, row in measured.items()
    ]
    about = {**found.about, "speed": speed, "checked_on_prompts": len(checked)}
    values = config.to_dict().items()  # all of them, so that no later version's defaults count
    concrete = {name: v for name, v in values if v is not None}
    text = json.dumps({**concrete, "about": {**about, "measured": measured}}, indent=1)
    write_atomically(file, text.encode() + b"\n")
    said = "\n".join([found.table(speed), *lines, str(file)])
    again = f"mame-sd generate --config {file}, or apply_mame(pipe, {str(file)!r})"
    answer(said, {"config": str(file), "speed": speed, "measured": measured}, again)


def _check(choice: ModelChoice, out: Path, file: Path) -> None:
    """Raise UserError for a folder with settings of another model or with another config.json."""
    if file.exists():
        try:
            there = json.loads(file.read_bytes())["about"]["model"]
            different = differences(there, known_identity(choice), partly=True, name="model")
        except (OSError, *RECORD_ERRORS):
            different = ["one with another config.json"]
        if different:
            raise UserError(
                f"--out {out}: expected a new folder, or one of an earlier calibration of this"
                f" model, got {in_short(different)}; choose another"
            )
    try:
        read_measurement(out / MEASURED)
    except ValueError as error:
        raise UserError(f"--out {out}: {error}") from None


def _measured(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    settings: GenerateSettings,
    base: MaMeConfig,
    out: Path,
) -> Calibration:
    about: dict[str, Any] = {
        "model": model.identity,
        "library": environment(model.pipe.device),
        "prompts": {"count": len(prompts), "sha256": prompts_digest(prompts)},
        **asdict(settings),
    }
    handle = Merging(base).install(model).handle
    out.mkdir(parents=True, exist_ok=True)
    try:
        runs = [partial(sample, model, settings, [job]) for job in jobs_of(prompts, settings)]
        with progress("prompts") as on_progress:
            return measure_images(handle, runs, about, out / MEASURED, on_progress)
    except ValueError as error:
        raise UserError(f"{error} (see --min-tokens, --height and --width)") from error
    finally:
        handle.remove()
