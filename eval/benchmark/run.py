"""Run a benchmark from prompts to report: generate every row, score, time and check.

    OUT/runs/<row>/            run folders, as `mame-sd generate` writes them
    OUT/bench.jsonl            every timing
    OUT/results.json           all results so far, rewritten after each step
    OUT/report.html            made from results.json

Images and timings continue where they were stopped, so the same command resumes a run.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mame_sd.config import MaMeConfig
from mame_sd.diffusion.denoisers import denoiser_of
from mame_sd.errors import MachineError, UserError
from mame_sd.report import counted
from mame_sd.runs.generate import environment, generate
from mame_sd.runs.jobs import GenerateSettings, cut_batches, jobs_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.merging import NotApplicable
from mame_sd.runs.prompt_files import Prompt, prompts_digest

from ..metric_list import METRICS, Metric
from ..results.schema import NOT_YET, MethodResult, Picture, Results, Value
from ..runner import Stage
from ..scoring.reference import Reference, check_foreign
from ..scoring.runs import Run, pair
from ..scoring.score import measured
from ..scoring.sets import withheld
from ..scoring.tools import Tools
from ..stats import paired_difference
from .bench import alike_batches, bench
from .gates import repeat_gates, sensitivity
from .results import TIMINGS, commit, write_results
from .rows import BASELINE, FLOOR, ONE_FEWER, RIVAL, Row
from .suites import Suite
from .timings import summary

GATE_BATCHES = 2


@dataclass(kw_only=True)
class Benchmark:
    """One benchmark, which `run` executes.

    Attributes:
        rows: the rows; the first one is the baseline.
        reference: the set that quality is measured against. If None, distances are withheld.
        stage: opens a step of that name and returns its progress callback.
        prompt_file: name and digest of the prompt file, for the manifest.
        command: the command that makes it again, for the report.
    """

    suite: Suite
    model: LoadedModel
    prompts: Sequence[Prompt]
    settings: GenerateSettings
    rows: Sequence[Row]
    metrics: Sequence[Metric]
    reference: Reference | None
    out: Path
    tools: Tools
    rounds: int
    stage: Stage
    prompt_file: dict[str, Any] | None = None
    command: str = ""
    results: Results = field(init=False)

    def __post_init__(self) -> None:
        self.rows = [row.on(self.model) for row in self.rows]

    def run(self) -> Results:
        """Run everything in order.

        Returns:
            The results, which are those of results.json.

        Raises:
            UserError, MachineError: what was done before is kept; the same call continues.
        """
        self.results = self._before()
        for row in self.rows:
            self._generate(row)
        runs = {row.name: Run.open(self._run(row.name)) for row in self.results.measured}
        check_foreign(self.reference, *runs.values())
        self._time()  # before any network of a metric takes memory
        for name, run in runs.items():
            self._score(name, run, runs[BASELINE])
        self._compare_rows(runs[BASELINE])
        if any(row.name == FLOOR for row in self.results.measured):
            self.results.sensitivity = sensitivity(self.results.measured, FLOOR)
        self._check(runs[BASELINE])
        return self.results

    def _before(self) -> Results:
        """Return the results before anything is measured."""
        rows = [
            MethodResult(
                name=row.name,
                label=row.label,
                family=row.family,
                default=row.default,
                config=row.config,
                reason=row.lacking or NOT_YET,
                run=f"runs/{row.name}",
            )
            for row in self.rows
        ]
        jobs, settings = jobs_of(self.prompts, self.settings), self.settings
        about = {} if self.reference is None else self.reference.about()
        file = (self.prompt_file or {}).get("name")
        here = (
            f"{counted(len(self.prompts), 'prompt')}{f' ({file})' if file else ''},"
            f" {counted(settings.steps, 'step')}, seed {settings.seed}, model"
            f" {self.model.identity['name']}"
        )
        return Results(
            suite=self.suite.name,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            manifest=self._manifest(),
            metrics=list(self.metrics),
            rows=rows,
            pictures=[Picture(job.name, job.prompt.text, job.seed) for job in jobs],
            reference=about.get("name"),
            reference_n=about.get("n"),
            notes=[f"{self.suite.about} Here: {here}."],
        )

    def _manifest(self) -> dict[str, Any]:
        """Return what the figures depend on."""
        processors = getattr(denoiser_of(self.model.pipe), "attn_processors", {})
        return {
            "suite": self.suite.name,
            "command": self.command,
            "commit": commit(),
            "model": dict(self.model.identity),
            "sampling": {
                **asdict(self.settings),
                "guidance": self.model.guidance
                if self.settings.guidance is None
                else self.settings.guidance,
            },
            "prompts": {
                "count": len(self.prompts),
                "sha256": prompts_digest(self.prompts),
                "file": self.prompt_file or {},
            },
            "environment": environment(self.model.pipe.device),
            "attention": sorted({type(processor).__name__ for processor in processors.values()}),
            "latency": {
                "rounds": self.rounds,
                "batch": self.settings.batch_size,
                "prompts": "another batch each round",
            },
            "methods": {row.name: row.config for row in self.rows},
            "reference": None if self.reference is None else self.reference.about(),
            "networks": {},
        }

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
                    on_progress=on_progress,
                )
        except NotApplicable as error:
            line.reason = str(error)
        else:
            line.measured, line.reason = True, None
        self._save()

    def _score(self, name: str, run: Run, baseline: Run) -> None:
        """Compute the values of one row, per image and of all images."""
        line = self.results.row(name)
        todo = []
        for metric in self.metrics:
            if metric.needs == "time" or (name == BASELINE and metric.needs == "pair"):
                continue
            reason = self._withheld(metric, run)
            if reason is None:
                todo.append(metric)
            else:
                line.values[metric.name] = Value(n=len(run.items), withheld=reason)
        pairs = pair(baseline, run)
        with self.stage(f"{line.label}: scores") as self.tools.on_progress:
            scores = measured(run, pairs, self.reference, todo, self.tools)
        line.values |= {name: value for name, (value, _) in scores.items()}
        line.per_image |= {name: values for name, (_, values) in scores.items() if values}
        self._save()

    def _withheld(self, metric: Metric, run: Run) -> str | None:
        """Return why a metric can't be computed for `run` on this machine, or None."""
        reason = withheld(metric, run, self.reference)
        if reason is not None:
            return reason
        try:
            self.tools.network(metric)
        except (UserError, MachineError) as error:
            self._note(f"{metric.network}: {error}")
            return f"not measured: no weights of {metric.network}"
        return None

    def _note(self, note: str) -> None:
        if note not in self.results.notes:
            self.results.notes.append(note)

    def _compare_rows(self, baseline: Run) -> None:
        """Compute p-values of fidelity against a rival, and of quality against the baseline.

        The rival is tomesd at 50 % or, if that wasn't measured, one step fewer.
        """
        prompts = {item.key: item.prompt_id for item in baseline.items.values()}
        rows = {row.name: row for row in self.results.measured}
        for row in rows.values():
            for name, values in row.per_image.items():
                near = METRICS[name].needs == "pair"
                other = (rows.get(RIVAL) or rows.get(ONE_FEWER)) if near else rows[BASELINE]
                if other is None or row is other or name not in other.per_image:
                    continue
                difference = paired_difference(values, other.per_image[name], prompts)
                row.values[name] = replace(
                    row.values[name], p=difference["p"], against=other.name, difference=difference
                )
        self._save()

    def _check(self, baseline: Run) -> None:
        """Run the sanity gates."""
        with self.stage("sanity gates"):
            batches = cut_batches(jobs_of(self.prompts, self.settings), self.settings.batch_size)
            self.results.gates = repeat_gates(
                self.model, self.settings, batches[:GATE_BATCHES], baseline, MaMeConfig()
            )
        self.results.manifest["networks"] = self.tools.about()
        self._save()

    def _time(self) -> None:
        """Measure latency and memory."""
        batches = alike_batches(jobs_of(self.prompts, self.settings), self.settings.batch_size)
        rows = [row for row in self.rows if self.results.row(row.name).measured]
        record = self.out / TIMINGS
        with self.stage("latency and memory") as on_progress:
            timings = bench(
                self.model, self.settings, batches, rows, self.rounds, record, on_progress
            )
        for row in rows:
            costs = summary(timings[row.name], timings[BASELINE])
            self.results.row(row.name).values.update(
                {m.name: costs[m.name] for m in self.metrics if m.name in costs}
            )
        self._save()

    def _run(self, name: str) -> Path:
        """Return the folder of a row's run."""
        return self.out / (self.results.row(name).run or "")

    def _save(self) -> None:
        write_results(self.out, self.results)
