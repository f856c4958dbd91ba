"""Write results.json, and check the folder that it goes to."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from mame_sd.errors import UserError
from mame_sd.json_files import json_text
from mame_sd.runs.files import check_place, write_atomically, writing

from ..results.schema import FORMAT, Results
from .timings import check_record

NAME, TIMINGS = "results.json", "bench.jsonl"
OWN = {"runs", TIMINGS, "report.html"}


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
    begun = "runs" in entries and OWN.issuperset(entries)
    if entries and NAME not in entries and not begun:
        raise UserError(
            f"--out {out}: expected a new or empty folder, or one begun by this command, got a"
            f" folder with {len(entries)} other things in it ({entries[0]!r}); choose another"
        )
    if NAME in entries:
        _check_results(out / NAME)
    if TIMINGS in entries:
        check_record(out / TIMINGS)


def _check_results(path: Path) -> None:
    """Raise UserError for results of another program or version, which aren't ours to overwrite."""
    try:
        form = json.loads(path.read_bytes().decode())["format"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: expected the results of a benchmark, got: {error!r:.80}; delete it and run"
            " benchmark again, nothing else is lost"
        ) from None
    if form != FORMAT:
        raise UserError(
            f"{path}: expected the results of a benchmark ({FORMAT!r}), got {form!r:.40}; choose"
            " another folder"
        )


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
