"""A benchmark from prompts to report: generate every row, score, time, check, and write it all
down.

    OUT/runs/<row>/            run folders, as `mame-sd generate` writes them
    OUT/bench.jsonl            every timing
    OUT/results.json           everything that is known so far, rewritten after each step
    OUT/report.html, ...       made of results.json

Images and timings continue where they were stopped, so the same command does. Several processes
share the images; the main one does all else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mame_sd.config import MaMeConfig
from mame_sd.errors import MachineError, UserError
from mame_sd.runs.generate import generate
from mame_sd.runs.jobs import cut_batches, jobs_of
from mame_sd.runs.methods import NotApplicable

from ..metric_list import METRICS, Metric
from ..results.schema import Results, Value
from ..scoring.reference import check_foreign
from ..scoring.runs import Run, pair
from ..scoring.score import cut_prompts, measured
from ..scoring.withheld import withheld, withheld_by
from ..stats import paired_difference
from .bench import alike_batches, bench
from .gates import ceiling_gate, repeat_gates
from .results import BUSY, TIMINGS, resumed, write_results
from .rows import BASELINE, FLOOR, RIVAL, Row
from .sensitivity import sensitivity
from .setup import Setup
from .timings import summary, timing_gate

Stage = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
GATE_BATCHES = 2
CEILING = ("psnr", "lpips")


@dataclass(kw_only=True)
class Benchmark(Setup):
    """One benchmark; `run` does it.

    Attributes:
        stage: opens a step of that name and gives its progress callback.
        results: what is known so far.
    """

    stage: Stage
    on_note: Callable[[str], None] = lambda note: None
    results: Results = field(init=False)

    def run(self) -> Results:
        """Everything, in order; returns the results, on the main process those of results.json.

        Raises:
            UserError, MachineError: what was done before is kept; the same call continues.
        """
        self.results = resumed(self.results_before(), self.out)
        self._save()
        for row in self.rows:
            self._generate(row)
        self.process.wait()  # the main process has written down what all have made
        if self.process.is_main:
            runs = {row.name: Run.open(self._run(row.name)) for row in self.results.measured}
            check_foreign(self.reference, *runs.values())
            self._time()  # before any network of a metric takes memory
            for name, run in runs.items():
                self._score(name, run, runs[BASELINE])
            self._compare_rows(runs[BASELINE])
            self.judge()
            self._check(runs[BASELINE])
        self.process.wait()
        return self.results

    def _generate(self, row: Row) -> None:
        line = self.results.row(row.name)
        if row.lacking is not None:
            return
        try:
            with self.stage(f"{row.label}: images") as on_progress:
                generate(
                    self.model,
                    self.prompts,
                    row.sampling(self.settings),
                    row.method,
                    self._run(row.name),
                    prompt_file=self.prompt_file,
                    process=self.process,
                    on_progress=on_progress,
                    on_note=self.on_note,
                )
        except NotApplicable as error:
            line.reason = str(error)
        else:
            line.measured, line.reason = True, None
        self._save()

    def _score(self, name: str, run: Run, baseline: Run) -> None:
        """Per-image and set-wide values of one row."""
        line = self.results.row(name)
        todo = []
        for metric in self.metrics:
            if metric.needs == "time" or (name == BASELINE and metric.needs in ("pair", "sets")):
                continue
            reason = self._withheld(metric, run)
            if reason is None:
                todo.append(metric)
            else:
                line.values[metric.name] = Value(n=len(run.items), withheld=reason)
        pairs = pair(baseline, run)
        with self.stage(f"{line.label}: scores") as self.tools.on_progress:
            found = measured(baseline, run, pairs, self.reference, todo, self.tools)
        line.values |= {name: value for name, (value, _) in found.items()}
        line.per_image |= {name: values for name, (_, values) in found.items() if values}
        self._save()

    def _withheld(self, metric: Metric, run: Run) -> str | None:
        """Why a metric can't be given for `run` on this machine, or None."""
        reason = withheld(metric, run, self.reference)
        if reason is not None:
            return reason
        try:
            network = self.tools.network(metric)
        except (UserError, MachineError) as error:
            self._note(f"{metric.network}: {error}")
            return f"not measured: no weights of {metric.network}"
        return withheld_by(metric, network, self.reference)

    def _note(self, note: str) -> None:
        if note not in self.results.notes:
            self.results.notes.append(note)

    def _compare_rows(self, baseline: Run) -> None:
        """P-values: fidelity against tomesd at 50 %, quality per image against the baseline."""
        prompts = {item.key: item.prompt_id for item in baseline.items.values()}
        rows = {row.name: row for row in self.results.measured}
        for row in rows.values():
            for name, values in row.per_image.items():
                other = rows.get(RIVAL if METRICS[name].needs == "pair" else BASELINE)
                if other is None or row is other or name not in other.per_image:
                    continue
                difference = paired_difference(values, other.per_image[name], prompts)
                row.values[name] = replace(
                    row.values[name], p=difference["p"], against=other.name, difference=difference
                )
        self._save()

    def judge(self) -> None:
        """Whether this model and these prompts can tell methods apart, where mean attention is
        among the rows.
        """
        rows = self.results.measured
        if any(row.name == FLOOR for row in rows):
            self.results.sensitivity = sensitivity(rows, FLOOR, RIVAL)
            self._save()

    def _check(self, baseline: Run) -> None:
        """The sanity gates."""
        others = [row for row in self.results.measured if row.name not in (BASELINE, FLOOR)]
        known = [
            metric
            for metric in self.metrics
            if metric.name in CEILING and others and all(row.value(metric) for row in others)
        ]
        with self.stage("sanity gates") as self.tools.on_progress:
            batches = cut_batches(jobs_of(self.prompts, self.settings), self.settings.batch_size)
            self.results.gates += repeat_gates(
                self.model, self.settings, batches[:GATE_BATCHES], baseline, MaMeConfig()
            )
            gate = ceiling_gate(baseline, known, [row.values for row in others], self.tools)
            self.results.gates += [] if gate is None else [gate]
        self.results.manifest["networks"] = self.tools.about()
        cut, prompts = cut_prompts(self.metrics, baseline, self.tools)
        if cut:
            self._note(f"CLIP read {cut} of {prompts} prompts only in part (77 tokens).")
        self._save()

    def _time(self) -> None:
        """Latency and memory."""
        batches = alike_batches(jobs_of(self.prompts, self.settings), self.settings.batch_size)
        rows = [row for row in self.rows if self.results.row(row.name).measured]
        record = self.out / TIMINGS
        with self.stage("latency and memory") as on_progress:
            timings = bench(
                self.model, self.settings, batches, rows, self.rounds, record, on_progress
            )
        gate = timing_gate(timings, BASELINE, min(torch.get_num_threads(), _cores()))
        self.results.gates = [gate]
        if not gate.passed:
            record.replace(self.out / BUSY)
        for row in rows:
            costs = summary(timings[row.name], withhold_seconds=not gate.passed)
            self.results.row(row.name).values.update(
                {m.name: costs[m.name] for m in self.metrics if m.name in costs}
            )
        self._save()

    def _run(self, name: str) -> Path:
        """The folder of a row's run."""
        return self.out / (self.results.row(name).run or "")

    def _save(self) -> None:
        if self.process.is_main:
            write_results(self.out, self.results)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
