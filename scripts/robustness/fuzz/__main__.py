"""Give the commands broken prompt files, configs, run folders and results, and see that each ends
in exit status 0 or 2.

    python -m scripts.robustness.fuzz [--cases 300] [--seed 0] [--processes 10]
        [--kinds prompts,configs,folders,results]
    python -m scripts.robustness.fuzz --kinds prompts --only 17  # one case again, with what it says

A case is drawn from (seed, kind, number) alone. It fails on another status than 0 or 2, a
traceback, or another number of error lines than one (none at 0). It also fails on a line of more
than 3,000 characters and an exception that leaves the command. Nor may any file operation change
something outside of the case's output folder. An audit hook sees all of these, links resolved.
Commands run in this process on a tiny pipeline of random weights; the first `--processes` of each
kind run once more as `python -m mame_sd`. Prints one line of JSON; exit status 1 when a case
failed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from mame_sd.cli import app
from mame_sd.eval.cli import app as eval_app
from scripts.robustness.fuzz.broken import Draw
from scripts.robustness.fuzz.cases import KINDS, Cases
from scripts.robustness.fuzz.watch import Watch, tree

ROOT = Path(__file__).resolve().parents[3]
LONGEST_LINE = 3000
PROGRAMS: dict[str, Callable[[list[str]], int]] = {"mame_sd": app.run, "mame_sd.eval": eval_app.run}


class Fuzz:
    """Cases, one after the other in one folder, and what came of each."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.cases = Cases(work)
        self.watch = Watch()

    def once(
        self, kind: str, number: int, seed: int, process: bool
    ) -> tuple[int | None, str, list[str]]:
        """Exit status, stderr and complaints of one case."""
        folder = self.work / "case"
        shutil.rmtree(folder, ignore_errors=True)
        program, arguments = self.cases.case(kind, Draw(f"{seed}-{kind}-{number}"), folder)
        before = tree(self.work, folder / "out")
        status, text, complaints = (_in_process if process else self._here)(
            program, arguments, folder
        )
        after = tree(self.work, folder / "out")
        complaints += [
            f"changed: {path}"
            for path in sorted({*before, *after})
            if before.get(path) != after.get(path)
        ]
        return status, text, [*complaints, *_complaints(status, text)]

    def _here(
        self, program: str, arguments: list[str], folder: Path
    ) -> tuple[int | None, str, list[str]]:
        status, strange, errors = None, [], io.StringIO()
        with (
            self.watch.only(folder / "out") as changes,
            contextlib.redirect_stderr(errors),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            try:
                status = PROGRAMS[program](arguments)
            except BaseException:
                strange.append(traceback.format_exc())
        return status, errors.getvalue(), strange + changes


def _in_process(program: str, arguments: list[str], folder: Path) -> tuple[int, str, list[str]]:
    command = [sys.executable, "-m", program, *map(os.fsencode, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder / "given", capture_output=True, env=environment)
    return done.returncode, done.stderr.decode("utf-8", "replace"), []


def _complaints(status: int | None, text: str) -> list[str]:
    lines = text.splitlines()
    errors = sum(line.startswith("error: ") for line in lines)
    wrong = {
        f"status {status}": status not in (0, 2),
        "a traceback": "Traceback" in text,
        "not one error line": errors != (status != 0),
        f"a line of more than {LONGEST_LINE:,} characters": max(map(len, lines), default=0)
        > LONGEST_LINE,
    }
    return [complaint for complaint, so in wrong.items() if so]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=300, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="with commas between")
    parser.add_argument(
        "--processes", type=int, default=10, help="cases of each kind that also run as a process"
    )
    parser.add_argument(
        "--only", type=int, default=None, help="run this case alone and print what it says"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: dict[str, Counter[str]] = {}
    failed = 0
    with tempfile.TemporaryDirectory() as work:
        fuzz = Fuzz(Path(work))
        for kind in options.kinds.split(","):
            counts[kind] = Counter()
            for number in range(options.cases) if options.only is None else [options.only]:
                for process in (False, True)[: 1 + (number < options.processes)]:
                    status, text, complaints = fuzz.once(kind, number, options.seed, process)
                    counts[kind][f"{'process ' if process else ''}{status}"] += 1
                    failed += bool(complaints)
                    if complaints or options.only is not None:
                        said = [
                            kind,
                            number,
                            status,
                            text[-600:],
                            [line[-3000:] for line in complaints],
                        ]
                        print(json.dumps(said), flush=True)
                if number % 50 == 49:
                    print(f"{kind}: {number + 1} of {options.cases}", file=sys.stderr, flush=True)
    print(json.dumps({"seed": options.seed, "status": counts, "failed": failed}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
