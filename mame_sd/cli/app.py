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
    PAPERS,
    PROMPTS,
    SAMPLING,
    MergingOptions,
    PromptOptions,
)
from mame_sd.cli.options import takes
from mame_sd.config import MaMeConfig
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.model_files import ModelChoice

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
SheetOption = Annotated[Path, typer.Option(help="The sheet, a .png file.", metavar="FILE")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"mame-sd {version('mame-sd')}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and end.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Faster diffusion without training: self-attention over merged keys or tokens (MaMe)."""


@app.command("generate")
@takes(prompts=PROMPTS, model=MODEL, sampling=SAMPLING, merging=MergingOptions(baseline=True))
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
    from mame_sd.cli.generate import run_generate

    run_generate(out, prompts, model, sampling, merging)


@app.command("compare")
@takes(model=MODEL, sampling=ONE_IMAGE, merging=MergingOptions())
def compare_command(
    *,
    prompt: Annotated[
        str, typer.Argument(help="The prompt.", metavar="PROMPT", show_default=False)
    ],
    out: SheetOption = Path("compare.png"),
    model: ModelChoice,
    sampling: GenerateSettings,
    merging: MaMeConfig,
) -> None:
    """Write one sheet: unmerged, your setting and two shares, with seconds and PSNR."""
    from mame_sd.cli.compare import run_compare

    run_compare(prompt, out, model, sampling, merging)


@app.command("calibrate")
@takes(
    prompts=PROMPTS,
    model=MODEL,
    sampling=ONE_IMAGE,
    merging=MergingOptions(without=("tau", "keep", "fit_queries", *PAPERS)),
)
def calibrate_command(
    *,
    speed: Annotated[
        float, typer.Option(help="How many times as fast the denoiser is to be.")
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
    from mame_sd.cli.calibrate import run_calibrate

    run_calibrate(speed, out, prompts.or_demo().read(), model, sampling, merging)


@app.command("sheet")
def sheet_command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, such as a baseline and a merged one.", show_default=False
        ),
    ],
    out: SheetOption = Path("sheet.png"),
    num: Annotated[int, typer.Option(help="Show the first NUM images.", metavar="NUM")] = 12,
) -> None:
    """Write one sheet of finished runs: the same images, run below run."""
    from mame_sd.cli.compare import run_sheet

    run_sheet(folders, out, num)


@app.command("doctor")
@takes(model=MODEL)
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
