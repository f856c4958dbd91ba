"""Run ``mame-sd-eval benchmark --suite readme``: all cases, into one JSON file and one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mame_sd.cli.console import note
from mame_sd.cli.groups import PromptOptions
from mame_sd.errors import MachineError, UserError
from mame_sd.json_files import json_text
from mame_sd.runs.files import check_place, write_atomically
from mame_sd.runs.generate import environment
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.processes import check_alone

from ..benchmark.readme import CASES, Case, of_results, stored, stored_case
from ..benchmark.results import commit
from ..benchmark.samples import measure_samples
from .benchmark import run_benchmark, stage
from .options import BenchmarkOptions


def run_readme(
    out: Path,
    prompts: PromptOptions,
    options: BenchmarkOptions,
    model: ModelChoice,
    sampling: dict[str, Any],
    command: str,
) -> dict[str, Any]:
    """Measure every case, or the one that `options` names, into a folder below `out`.

    `out`/readme.json is written after each case. On a CPU one thread computes, so that CPU seconds
    are those of the work alone.

    Args:
        out: folder of the results. An earlier run of the same command there is continued.
        prompts: prompts instead of the cases'.
        options: the rows, and the case if only one is measured.
        model: a model instead of the cases'.
        sampling: fields of GenerateSettings. If it has a seed, the cases begin with other noise.
        command: command that makes the results again.

    Returns:
        What readme.json holds.

    Raises:
        UserError: several processes, whose seconds can't be compared; an unknown case or row; a
            foreign folder.
    """
    check_alone("--suite readme")
    cases = [case for case in CASES if options.case in (None, case.name)]
    if not cases:
        names = ", ".join(case.name for case in CASES)
        raise UserError(f"--case: expected one of {names}, got {options.case!r}; correct it")
    for case in cases:  # unknown rows and settings are found before the first hour
        case.rows(options.rows, options.row)
    _check_out(out)
    torch.set_num_threads(1)
    about = {**environment(torch.device("cpu")), "command": command}
    found: dict[str, Any] = {}
    for case in cases:
        one = _measured(case, out, prompts, options, model, sampling, command)
        if one is not None:
            found[case.name] = one
            text = json_text(stored(found, about), indent=1) + "\n"
            write_atomically(out / "readme.json", text.encode())
    return stored(found, about)


def _check_out(out: Path) -> None:
    """Raise UserError for a folder that holds anything but cases and their results."""
    if check_place(out, out) != out:
        return
    own = {"readme.json", *(case.name for case in CASES)}
    entries = sorted(entry.name for entry in out.iterdir() if not entry.name.startswith("."))
    foreign = [entry for entry in entries if entry.removesuffix(".jsonl") not in own]
    if foreign:
        raise UserError(
            f"--out {out}: expected a new or empty folder, or one begun by this command, got one"
            f" with other things in it ({foreign[0]!r}); choose another"
        )


def _measured(
    case: Case,
    out: Path,
    prompts: PromptOptions,
    options: BenchmarkOptions,
    model: ModelChoice,
    sampling: dict[str, Any],
    command: str,
) -> dict[str, Any] | None:
    """Measure a case, and return what readme.json holds of it; None without its weights."""
    place, suite = out / case.name, case.suite
    if case.load is None:
        results = run_benchmark(suite, place, prompts, options, model, sampling, command)
        return of_results(case, results)
    rows = case.rows(options.rows, options.row)
    try:
        sampler = case.load()
    except (UserError, MachineError) as error:
        note(f"left out: {case.title} ({error})")
        return None
    draws = suite.num if prompts.num is None else prompts.num
    with stage(f"{case.title}: samples") as on_progress:
        values = measure_samples(
            sampler, rows, draws, suite.steps, place.with_suffix(".jsonl"), on_progress, note,
            sampling.get("seed", 0),
        )  # fmt: skip
    made = {"command": command, "commit": commit()}
    by_row = [(row, values[row.name]) for row in rows if row.name in values]
    return stored_case(f"{case.title}, {draws} draws", made, by_row)
