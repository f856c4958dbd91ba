"""Run ``mame-sd-eval benchmark``: from options to a `Benchmark` and its report."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mame_sd.cli.console import OUTPUT, note, progress, say
from mame_sd.cli.groups import PromptOptions
from mame_sd.embedded.model import embedded_models
from mame_sd.errors import MachineError, UserError
from mame_sd.runs.devices import pick_device
from mame_sd.runs.generate import generate
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.loading import LoadedModel, load_model
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.processes import check_alone
from mame_sd.runs.prompt_files import Prompt

from .. import PROGRAM
from ..benchmark.results import check_out
from ..benchmark.rows import Row, chosen_rows
from ..benchmark.run import Benchmark
from ..benchmark.suites import Suite
from ..metric_list import EMBEDDED_CLIP, METRICS
from ..results.schema import Results
from ..scoring.reference import Reference, open_reference
from ..scoring.tools import CLIPS, Tools
from .options import BenchmarkOptions
from .prompts import suite_prompts


def run_benchmark(
    suite: Suite,
    out: Path,
    prompts: PromptOptions,
    options: BenchmarkOptions,
    model: ModelChoice,
    sampling: dict[str, Any],
    command: str,
) -> Results:
    """Run a suite, overridden by what was given, and write its report.

    Args:
        suite: the suite.
        out: folder of the results. An earlier run of the same command there is continued.
        prompts: prompts instead of the suite's.
        options: what is compared, and with what.
        model: a model instead of the suite's.
        sampling: fields of GenerateSettings instead of the suite's.
        command: command that makes the report again.

    Raises:
        UserError, MachineError: what was done before is kept, and the same call continues.
    """
    from ..report import render

    check_alone("benchmark")
    check_out(out)
    own = () if options.rows else suite.own
    wanted = chosen_rows(options.rows or suite.rows, [*own, *options.row])
    note_lacking(wanted)
    settings = GenerateSettings(**suite.sampling(sampling))
    choice = _suite_model(suite, model)
    held_out = options.held_out or (suite.held_out and prompts.file is None)
    chosen, prompt_file = suite_prompts(suite, prompts, choice.embedded, held_out)
    against, reference = None, options.reference
    if reference is not None:
        if reference.resolve().is_relative_to(out.resolve()):
            raise UserError(
                f"--reference {reference}: expected images of another origin than --out {out};"
                " give others"
            )
        against = open_reference(reference)
    clip = options.clip
    if clip is None and choice.embedded and "clip" in embedded_models():
        clip = EMBEDDED_CLIP
    tools = Tools(
        weights_dir=options.weights_dir,
        offline=model.offline,
        fetch=suite.fetch and (*suite.fetch, *(["clip"] if clip else [])),
        device=pick_device(choice.device),
        clip=clip or CLIPS[0],
    )
    loaded = load_model(choice)
    counts_memory = tools.device.type in ("cuda", "cpu")
    if against is None and suite.other_seed is not None:
        against = _other_seed(suite.other_seed, loaded, chosen, settings, out)
    results = Benchmark(
        suite=suite,
        model=loaded,
        prompts=chosen,
        settings=settings,
        rows=wanted,
        metrics=[
            metric
            for name, metric in METRICS.items()
            # Other devices than these two count no memory.
            if name in suite.metrics and (counts_memory or not name.startswith("memory"))
        ],
        reference=against,
        out=out,
        tools=tools,
        stage=stage,
        rounds=options.rounds or suite.rounds,
        prompt_file=prompt_file,
        command=command,
    ).run()
    render(results, out)
    check_gates(results, out)
    return results


def _other_seed(
    seed: int,
    model: LoadedModel,
    prompts: Sequence[Prompt],
    settings: GenerateSettings,
    out: Path,
) -> Reference:
    """Return a reference set of the unmerged model's images from other noise."""
    folder = out / "runs" / f"seed-{seed}"
    with stage(f"unmerged images of seed {seed}") as on_progress:
        other = replace(settings, seed=seed)
        generate(model, prompts, other, None, folder, on_progress=on_progress)
    return open_reference(folder)


def note_lacking(rows: Sequence[Row]) -> None:
    """Print a note on rows that are left out because a package is missing."""
    for reason in dict.fromkeys(row.lacking for row in rows if row.lacking is not None):
        names = ", ".join(row.name for row in rows if row.lacking == reason)
        note(f"left out: {names} ({reason})")


def check_gates(results: Results, out: Path) -> None:
    """Raise MachineError if a sanity gate of the report in `out` failed."""
    failed = ", ".join(gate.name for gate in results.failed)
    if failed:
        raise MachineError(
            f"{out}/report.html: sanity gates failed ({failed}); "
            "do not trust these figures before the report's gates say why"
        )


def command_again(arguments: Sequence[str]) -> str:
    """Return the command line of these arguments as a shell reads it, without --out."""
    kept = [
        word
        for before, word in zip(["", *arguments], arguments, strict=False)
        if before != "--out" and word.partition("=")[0] != "--out"
    ]
    return shlex.join([PROGRAM, *kept])


@contextmanager
def stage(name: str) -> Iterator[Callable[[int, int], None]]:
    """Name on stderr what is being done, with a bar on a terminal; see `runner.Stage`."""
    if not OUTPUT.get().quiet:
        say(f"{name} ...")
    with progress("images") as on_progress:
        yield on_progress


def _suite_model(suite: Suite, given: ModelChoice) -> ModelChoice:
    """Return `given`, completed by the suite's own."""
    own: dict[str, Any] = {}
    if given.model is None:
        own = {"model": suite.model, "loras": given.loras or suite.loras}
    if given.scheduler is None and suite.scheduler is not None:
        own["scheduler"] = suite.scheduler
    if given.dtype == "auto":
        own["dtype"] = suite.dtype
    return replace(given, **own)
