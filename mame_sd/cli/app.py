"""The command line, ``mame-sd``: thin commands over the modules beside it.

torch and diffusers are imported inside the commands, after cheap checks, so that help and usage
errors come at once.
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
    MODEL,
    ONE_IMAGE,
    PROMPTS,
    SAMPLING,
    TAU_FIELDS,
    MergingOptions,
    PromptOptions,
)
from mame_sd.cli.options import command, program
from mame_sd.cli.sheet import check_sheet_path
from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.files import check_place
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.prompt_files import prompts_from_texts
from mame_sd.runs.run_folder import RunFolder

app = program(
    "mame-sd", "Make images with merged attention keys or restored layers, without training."
)
SheetOption = Annotated[Path, typer.Option(help="The sheet, a .png file.", metavar="FILE")]


@command(
    app,
    "generate",
    prompts=PROMPTS,
    model=MODEL,
    sampling=SAMPLING,
    merging=MergingOptions(baseline=True),
)
def generate_command(
    *,
    out: Annotated[
        Path,
        typer.Option(help="Run folder: new, empty, or begun by the same command.", metavar="DIR"),
    ] = Path("out/generate"),
    prompts: PromptOptions,
    model: ModelChoice,
    sampling: GenerateSettings,
    merging: MaMeConfig | None,
) -> None:
    """Generate images from prompts, with merging on.

    Run again to continue; launch with accelerate to share out.
    """
    chosen = prompts.read()
    RunFolder(out).check()
    model.check_place()
    from mame_sd.cli.generate import run_generate

    run_generate(out, chosen, model, sampling, merging)


@command(app, "compare", model=MODEL, sampling=ONE_IMAGE, merging=MergingOptions())
def compare_command(
    *,
    prompts: Annotated[
        list[str], typer.Argument(help="The prompts.", metavar="PROMPT", show_default=False)
    ],
    out: SheetOption = Path("compare.png"),
    rounds: Annotated[
        int, typer.Option(help="Make each image NUM times, for steadier seconds.", metavar="NUM")
    ] = 1,
    model: ModelChoice,
    sampling: GenerateSettings,
    merging: MaMeConfig,
) -> None:
    """Write one sheet: unmerged, merged and one step fewer, with seconds and differences."""
    chosen = prompts_from_texts(prompts)
    if rounds < 1:
        raise UserError(f"--rounds: expected at least 1, got {rounds}; raise it")
    check_sheet_path(out)
    model.check_place()
    from mame_sd.cli.compare import run_compare

    run_compare(chosen, out, rounds, model, sampling, merging)


@command(
    app,
    "calibrate",
    prompts=PROMPTS,
    model=MODEL,
    sampling=ONE_IMAGE,
    merging=MergingOptions(without=("tau", "keep", "fit_queries", *TAU_FIELDS)),
)
def calibrate_command(
    *,
    speed: Annotated[
        float, typer.Option(help="How many times as fast the denoiser is to be.", metavar="NUMBER")
    ] = 1.2,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for config.json and measurements; run again to continue.", metavar="DIR"
        ),
    ] = Path("out/calibrate"),
    prompts: PromptOptions,
    model: ModelChoice,
    sampling: GenerateSettings,
    merging: MaMeConfig,
) -> None:
    """Find which layers of your model should merge, and write them for --config.

    A few prompts calibrate, the others check what was found.
    """
    chosen = prompts.or_demo().read()
    check_place(out, out)
    from mame_sd.cli.calibrate import run_calibrate

    run_calibrate(speed, out, chosen, model, sampling, merging)


@command(app, "sheet")
def sheet_command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, such as a baseline and a merged one.",
            metavar="RUN",
            show_default=False,
        ),
    ],
    out: SheetOption = Path("sheet.png"),
    num: Annotated[int, typer.Option(help="Show the first NUM images.", metavar="NUM")] = 12,
) -> None:
    """Write one sheet of finished runs: the same images, run below run."""
    from mame_sd.cli.run_sheet import run_sheet

    run_sheet(folders, out, num)


@command(app, "doctor", model=MODEL)
def doctor_command(*, model: ModelChoice) -> None:
    """Say what works on this machine, and what would fail."""
    from mame_sd.cli.doctor import examine, print_checks

    print_checks(examine(model))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status; every failure has become one line on
    stderr.
    """
    return exit_status(lambda: invoke(arguments))


def invoke(arguments: Sequence[str] | None = None) -> Any:
    """Run one command line (that of the process by default), failures as exceptions."""
    os.environ.setdefault(
        "TRANSFORMERS_VERBOSITY", "error"
    )  # its import-time notices are not about our users' input
    return app(
        list(sys.argv[1:] if arguments is None else arguments), "mame-sd", standalone_mode=False
    )
