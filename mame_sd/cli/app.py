"""Define the commands of ``mame-sd``.

Commands import their bodies, torch and diffusers only after cheap checks, so that help and errors
appear immediately.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mame_sd.cli.errors import exit_status
from mame_sd.cli.groups import (
    MERGED,
    MERGING,
    MODEL,
    ONE_IMAGE,
    PROMPTS,
    SAMPLING,
    MergingOptions,
    PromptOptions,
)
from mame_sd.cli.options import FieldOptions, command, program
from mame_sd.cli.sheet import check_sheet_path
from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.files import check_place
from mame_sd.runs.jobs import GenerateSettings, described_sampling
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.run_folder import RunFolder

app = program(
    "mame-sd", "Make images with merged attention keys or restored layers, without training."
)
CALIBRATED = FieldOptions(MergingOptions, "Merging", ("baseline", "keep", "tau"))
SHOWN_MODEL = FieldOptions(
    ModelChoice,
    "Model",
    defaults={"model": "embedded-transformer"},
    help={"model": "Folder, hub id, .safetensors file or embedded-NAME to load."},
)
SHOWN_SAMPLING = FieldOptions(
    GenerateSettings,
    "Sampling",
    ("seed", "negative_prompt", "batch_size", "images_per_prompt"),
    {"steps": 4},
)


@command(app, "generate", prompts=PROMPTS, model=MODEL, sampling=SAMPLING, merging=MERGING)
def generate_command(
    *,
    out: Annotated[
        Path,
        typer.Option(help="Run folder: new, empty, or begun by the same command.", metavar="DIR"),
    ] = Path("out/generate"),
    prompts: PromptOptions,
    model: ModelChoice,
    sampling: GenerateSettings,
    merging: MergingOptions,
) -> None:
    """Generate images from prompts, with merging on.

    Run again to continue; launch with accelerate to share the work.
    """
    config, chosen = merging.read(), prompts.read()
    settings = {**described_sampling(chosen, sampling), "model": model.identity()}
    if config is None:
        settings["mame"] = None
    elif config.given:  # otherwise the model's mame.json may decide
        settings["mame"] = config.to_dict(given_only=True)
    RunFolder(out).check(settings)
    model.check_place()
    from mame_sd.cli.generate import run_generate

    run_generate(out, chosen, model, sampling, config)


@command(app, "compare", prompts=PROMPTS, model=MODEL, sampling=ONE_IMAGE, merging=MERGED)
def compare_command(
    *,
    out: Annotated[Path, typer.Option(help="Sheet to write, a .png file.", metavar="FILE")] = Path(
        "compare.png"
    ),
    rounds: Annotated[
        int, typer.Option(help="Make each image NUM times, for steadier seconds.", metavar="NUM")
    ] = 1,
    prompts: PromptOptions,
    model: ModelChoice,
    sampling: GenerateSettings,
    merging: MergingOptions,
) -> None:
    """Write one sheet: unmerged, merged and one step fewer, with seconds and differences."""
    config, chosen = merging.read() or MaMeConfig(), prompts.read()
    if rounds < 1:
        raise UserError(f"--rounds: expected at least 1, got {rounds}; raise it")
    check_sheet_path(out)
    model.check_place()
    from mame_sd.cli.compare import run_compare

    run_compare(chosen, out, rounds, model, sampling, config)


@command(app, "ui", model=SHOWN_MODEL, sampling=SHOWN_SAMPLING)
def ui_command(
    *,
    port: Annotated[
        int, typer.Option(help="Port on this machine; 0 picks a free one.", metavar="NUM")
    ] = 7860,
    model: ModelChoice,
    sampling: GenerateSettings,
) -> None:
    """Serve a page on this machine that shows unmerged and merged images side by side."""
    if not 0 <= port < 2**16:
        raise UserError(f"--port: expected a number from 0 to 65535, got {port}; choose another")
    model.check_place()
    from mame_sd.cli.ui import run_ui

    run_ui(port, model, sampling)


@command(app, "calibrate", prompts=PROMPTS, model=MODEL, sampling=ONE_IMAGE, merging=CALIBRATED)
def calibrate_command(
    *,
    speed: Annotated[
        float, typer.Option(help="Target speed-up of the denoiser, such as 1.2.", metavar="NUMBER")
    ] = 1.2,
    out: Annotated[
        Path,
        typer.Option(help="Folder for config.json and the measurements.", metavar="DIR"),
    ] = Path("out/calibrate"),
    prompts: PromptOptions,
    model: ModelChoice,
    sampling: GenerateSettings,
    merging: MergingOptions,
) -> None:
    """Find how much each block of your model should merge, and write it for --config.

    Up to four prompts are used. Run again to continue; `mame-sd compare` shows what it found.
    """
    config, chosen = merging.read() or MaMeConfig(), prompts.or_demo().read()
    if not 1 < speed < float("inf"):
        raise UserError(f"--speed: expected a number above 1, got {speed:g}; try 1.2")
    if config.method != "keys":
        raise UserError("merging: expected no tau, for calibration tries shares to keep; drop it")
    check_place(out, out)
    model.check_place()
    from mame_sd.cli.calibrate import run_calibrate

    run_calibrate(speed, out, chosen, model, sampling, config)


@command(app, "doctor", model=MODEL)
def doctor_command(*, model: ModelChoice) -> None:
    """Say what works on this machine, and what would fail."""
    from mame_sd.cli.doctor import examine, print_checks

    print_checks(examine(model))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status; report failures as one line on stderr."""
    return exit_status(lambda: invoke(arguments))


def invoke(arguments: Sequence[str] | None = None) -> Any:
    """Run one command line (by default that of the process); failures are exceptions."""
    # Notices of transformers at import are not about our users' input.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    words = list(sys.argv[1:] if arguments is None else arguments)
    return app(words, "mame-sd", standalone_mode=False)
