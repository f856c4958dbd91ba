"""Write and read results.json, the one file that a benchmark writes and a report reads."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mame_sd.errors import UserError
from mame_sd.json_files import json_text
from mame_sd.runs.files import check_place, write_atomically, writing
from mame_sd.runs.run_folder import differences, in_short

from ..results.read import parse
from ..results.schema import FORMAT, MethodResult, Results
from .timings import check_record

NAME, TIMINGS = "results.json", "bench.jsonl"
BUSY = "bench-busy.jsonl"  # timings of a busy machine, which the next start takes anew
OWN = {"runs", "answers", TIMINGS, BUSY, "report.html"}


def check_out(out: Path) -> None:
    """Raise UserError unless `out` is a new or empty folder, or one of a benchmark.

    A folder of a benchmark whose results.json was deleted is accepted: everything in it is found
    again.
    """
    if check_place(out, out) != out:
        return
    with writing(out):
        # without files that are being written
        entries = sorted(name for name in os.listdir(out) if not name.startswith(".mame-sd."))
    begun = {"runs", "answers"}.intersection(entries)
    if entries and NAME not in entries and not (begun and OWN.issuperset(entries)):
        raise UserError(
            f"--out {out}: expected a new or empty folder, or one begun by this command, got a"
            f" folder with {len(entries)} other things in it ({entries[0]!r}); choose another"
        )
    if NAME in entries:
        read_results(out)
    if TIMINGS in entries:
        check_record(out / TIMINGS)


def read_results(out: Path) -> Results:
    """Read the results in `out`. Raise UserError if there are none."""
    path = out / NAME
    try:
        values: Any = json.loads(path.read_bytes().decode())
    except FileNotFoundError:
        raise UserError(
            f"{out}: expected the folder of a benchmark, found no {NAME}; run benchmark first"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: expected the results of a benchmark, got: {error}; delete it and run"
            " benchmark again, nothing else is lost"
        ) from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UserError(
            f"{path}: expected the results of a benchmark ({FORMAT!r}), got another file; choose"
            " another"
        )
    return parse(values)


def write_results(out: Path, results: Results) -> None:
    """Write results.json whole or not at all."""
    write_atomically(out / NAME, (json_text(results.to_json(), indent=1) + "\n").encode())


def commit() -> str | None:
    """Return the checkout's commit, followed by "+" if files were changed; None without git."""
    place = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=place, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return None


def generation_settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with which a benchmark of generation must be continued."""
    return {
        "model": manifest["model"],
        **manifest["sampling"],
        "prompts": manifest["prompts"]["sha256"],
    }


def resumed(
    results: Results,
    out: Path,
    settings: Callable[[Mapping[str, Any]], dict[str, Any]] = generation_settings,
) -> Results:
    """Return `results` with the rows that an earlier start of the same benchmark left in `out`.

    They have no figures: timings are read from bench.jsonl, which says what they depend on, and
    scores are computed again.

    Args:
        results: the results before anything is measured.
        out: folder of the benchmark.
        settings: returns of a manifest the settings with which it must be continued.

    Raises:
        UserError: `out` was begun with another model, settings or prompts. Its results stay.
    """
    if not (out / NAME).exists():
        return results
    before = read_results(out)
    there, here = (settings(it.manifest) for it in (before, results))
    different = differences(there, here)
    if different:
        raise UserError(
            f"--out {out}: expected the settings it was begun with, got {in_short(different)};"
            " choose another --out, or give the same settings"
        )
    rows = {row.name: row for row in before.rows if row.measured}
    return replace(results, rows=[_as_before(row, rows.get(row.name)) for row in results.rows])


def _as_before(row: MethodResult, before: MethodResult | None) -> MethodResult:
    """Return `row` as an earlier start left one of the same settings, without figures."""
    config = json.loads(json_text(dict(row.config)))
    if before is None or before.config != config:
        return row
    return replace(before, label=row.label, config=row.config, values={}, per_image={})
