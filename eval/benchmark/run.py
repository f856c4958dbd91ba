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
from ..results.schema import Row as Line
from ..scoring.reference import check_foreign
from ..scoring.runs import Run, pair
from ..scoring.score import cut_prompts, measured
from ..scoring.tools import network_name
from ..scoring.withheld import withheld, withheld_by
from ..stats import paired_difference
from .bench import alike_batches, bench
from .gates import ceiling_gate, repeat_gates
from .results import BUSY, TIMINGS, resumed, write_results
from .rows import BASELINE, FLOOR, RIVAL, Row
from .sensitivity import sensitivity
from .setup import Setup
from .timings import summary, timing_gate, without_seconds

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
            runs = {row.name: Run.open(self._run(row.name)) for row in self._measured()}
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
        for metric_name, (value, values) in found.items():
            line.values[metric_name] = value
            if values:
                line.per_image[metric_name] = values
        self._save()

    def _withheld(self, metric: Metric, run: Run) -> str | None:
        """Why a metric can't be given for `run` on this machine, or None."""
        reason = withheld(metric, run, self.reference)
        if reason is not None:
            return reason
        try:
            network = self.tools.network(metric)
        except (UserError, MachineError) as error:
            name = network_name(metric)
            note = f"{name}: {error}"
            if note not in self.results.notes:
                self.results.notes.append(note)
            return f"not measured: no weights of {name}"
        return withheld_by(metric, network, self.reference)

    def _compare_rows(self, baseline: Run) -> None:
        """P-values: fidelity against tomesd at 50 %, quality per image against the baseline."""
        prompts = {item.key: item.prompt_id for item in baseline.items.values()}
        for row in self._measured():
            for name, values in row.per_image.items():
                against = RIVAL if METRICS[name].needs == "pair" else BASELINE
                other = next((other for other in self._measured() if other.name == against), None)
                if other is None or row is other or name not in other.per_image:
                    continue
                difference = paired_difference(values, other.per_image[name], prompts)
                row.values[name] = replace(
                    row.values[name], p=difference["p"], against=against, difference=difference
                )
        self._save()

    def judge(self) -> None:
        """Whether this model and these prompts can tell methods apart, where mean attention is
        among the rows.
        """
        if any(row.name == FLOOR for row in self._measured()):
            self.results.sensitivity = sensitivity(self._measured(), FLOOR, RIVAL)
            self._save()

    def _check(self, baseline: Run) -> None:
        """The sanity gates."""
        found = [row.values for row in self._measured() if row.name not in (BASELINE, FLOOR)]
        chosen = [metric for metric in self.metrics if metric.name in CEILING]
        known = [
            m
            for m in chosen
            if found and not any(values.get(m.name, Value()).withheld for values in found)
        ]
        with self.stage("sanity gates") as self.tools.on_progress:
            batches = cut_batches(jobs_of(self.prompts, self.settings), self.settings.batch_size)
            self.results.gates += repeat_gates(
                self.model, self.settings, batches[:GATE_BATCHES], baseline, MaMeConfig()
            )
            gate = ceiling_gate(baseline, known, found, self.tools)
            self.results.gates += [] if gate is None else [gate]
        self.results.manifest["networks"] = self.tools.about()
        cut, prompts = cut_prompts(self.metrics, baseline, self.tools)
        if cut:
            self.results.notes.append(
                f"CLIP read {cut} of {prompts} prompts only in part (77 tokens)."
            )
        self._save()

    def _time(self) -> None:
        """Latency and memory."""
        jobs = jobs_of(self.prompts, self.settings)
        batches = alike_batches(jobs, self.settings.batch_size)
        rows = [row for row in self.rows if self.results.row(row.name).measured]
        with self.stage("latency and memory") as on_progress:
            timings = bench(
                self.model,
                self.settings,
                batches,
                rows,
                self.rounds,
                self.out / TIMINGS,
                on_progress,
            )
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        gate = timing_gate(timings, BASELINE, min(torch.get_num_threads(), cores))
        self.results.gates = [gate]
        if not gate.passed:
            (self.out / TIMINGS).replace(self.out / BUSY)
        for row in rows:
            costs = summary(timings[row.name])
            costs = costs if gate.passed else without_seconds(costs)
            self.results.row(row.name).values.update(
                {m.name: costs[m.name] for m in self.metrics if m.name in costs}
            )
        self._save()

    def _run(self, name: str) -> Path:
        """The folder of a row's run."""
        return self.out / (self.results.row(name).run or "")

    def _measured(self) -> list[Line]:
        return self.results.measured

    def _save(self) -> None:
        if self.process.is_main:
            write_results(self.out, self.results)
