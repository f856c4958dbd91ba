"""A benchmark from prompts to report: generate with every method, score, time, check, and write it all down.

    OUT/runs/<row>/            run folders, as `mame-sd generate` writes them
    OUT/scores/<row>.json      per-image scores, with a digest of the images they are of
    OUT/features/              features of images, for distances
    OUT/bench.jsonl            every timing
    OUT/results.json           everything that is known so far, rewritten after each step
    OUT/report.html, ...       made of results.json

Every step continues where it was stopped, so the same command does.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mame_sd.config import MaMeConfig
from mame_sd.errors import MachineError, UserError
from mame_sd.runs.generate import environment, generate
from mame_sd.runs.jobs import GenerateSettings, cut_batches, jobs_of
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.prompt_files import Prompt, prompts_digest
from mame_sd.runs.run_folder import differences

from ..metric_list import METRICS, Metric
from ..scoring.reference import Reference, check_foreign
from ..scoring.runs import Run, pair
from ..scoring.score import cut_prompts, image_values, mean_value, pair_values, set_value
from ..scoring.score_file import ScoreFile
from ..scoring.tools import Tools, network_name
from ..scoring.withheld import withheld, withheld_by
from ..stats import paired_difference
from .bench import alike_batches, bench
from .gates import ceiling_gate, repeat_gates
from .manifest import attention_of
from .methods import Method, NotApplicable
from .results import FORMAT, TIMINGS, read_results, write_results
from .suites import Suite
from .timings import summary
from .trace import kept_per_step

Stage = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
RIVAL = "tomesd-50"  # what merging's fidelity is tested against
BASELINE = "baseline"
GATE_BATCHES = 2
CEILING = ("psnr", "lpips")


@dataclass
class Benchmark:
    """One benchmark; `run` does it.

    Attributes:
        methods: the rows; the first is the baseline.
        reference: what quality is measured against; None: distances are withheld.
        tools: of this process among those that `tools.process` counts, which must have joined one another.
        stage: opens a step of that name and gives its progress callback.
        prompt_file: name and digest of the prompt file, for the manifest.
        command: what makes it again, for the report; "": that of the suite.
    """

    suite: Suite
    model: LoadedModel
    prompts: Sequence[Prompt]
    settings: GenerateSettings
    methods: Sequence[Method]
    metrics: Sequence[Metric]
    reference: Reference | None
    out: Path
    tools: Tools
    stage: Stage
    rounds: int
    on_note: Callable[[str], None] = lambda note: None
    prompt_file: dict[str, Any] | None = None
    command: str = ""
    results: dict[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Everything, in order; returns the results, on the main process those of results.json.

        Raises:
            UserError, MachineError: what was done before is kept; the same call continues.
        """
        self.results = resumed(self._nothing_yet(), self.out)
        self._save()
        for method in self.methods:
            self._generate(method)
        self.tools.process.wait()  # the main process has written down what all have made
        runs = {row["name"]: Run.open(self.out / row["run"]) for row in self._measured()}
        check_foreign(self.reference, *runs.values())
        self._time()  # before any network of a metric takes memory
        self.tools.process.wait()
        for name, run in runs.items():
            self._score(name, run, runs[BASELINE])
        self._compare_rows(runs[BASELINE])
        self._check(runs[BASELINE])
        return self.results

    def _nothing_yet(self) -> dict[str, Any]:
        rows = [
            {
                "name": method.name,
                "label": method.label,
                "family": method.family,
                "default": method.default,
                "config": method.config,
                "run": f"runs/{method.name}",
                "status": "not measured",
                "reason": method.lacking or "not yet: the benchmark has not come to it",
                "values": {},
                "per_image": {},
                "kept": [],
            }
            for method in self.methods
        ]
        jobs = jobs_of(self.prompts, self.settings)
        return {
            "format": FORMAT,
            "suite": self.suite.name,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "manifest": self._manifest(),
            "metrics": {metric.name: metric.column() for metric in self.metrics},
            "rows": rows,
            "images": {job.name: {"prompt": job.prompt.text, "seed": job.seed} for job in jobs},
            "gates": [],
            "reference": None if self.reference is None else self.reference.about(),
            "notes": [f"{self.suite.about} Here: {self._words()}."],
        }

    def _words(self) -> str:
        """What was really painted, whatever the suite's own settings are."""
        file, settings = self.prompt_file or {}, self.settings
        prompts = f"{len(self.prompts)} prompts" + (f" ({file['name']})" if file.get("name") else "")
        steps = f"{settings.steps} step" + "s" * (settings.steps != 1)
        return f"{prompts}, {steps}, seed {settings.seed}, model {self.model.identity['name']}"

    def _manifest(self) -> dict[str, Any]:
        return {
            "suite": self.suite.name,
            "command": self.command,
            "model": dict(self.model.identity),
            "sampling": {
                **asdict(self.settings),
                "guidance": self.model.guidance if self.settings.guidance is None else self.settings.guidance,
            },
            "prompts": {
                "count": len(self.prompts),
                "sha256": prompts_digest(self.prompts),
                "file": self.prompt_file or {},
            },
            "environment": {**environment(self.model), "processes": self.tools.process.count},
            "attention": attention_of(self.model),
            "latency": {
                "rounds": self.rounds,
                "batch": self.settings.batch_size,
                "prompts": "another batch each round",
            },
            "methods": {method.name: method.config for method in self.methods},
            "reference": None if self.reference is None else self.reference.about(),
            "networks": {},
        }

    def _generate(self, method: Method) -> None:
        row = self._row(method.name)
        if method.lacking is not None:
            return
        try:
            with self.stage(f"{method.label}: images") as on_progress:
                generate(
                    self.model,
                    self.prompts,
                    self.settings,
                    method.patch,
                    self.out / row["run"],
                    prompt_file=self.prompt_file,
                    process=self.tools.process,
                    on_progress=on_progress,
                    on_note=self.on_note,
                )
        except NotApplicable as error:
            row["reason"] = str(error)
        else:
            row.update(status="measured", reason=None)
        self._save()

    def _score(self, name: str, run: Run, baseline: Run) -> None:
        """Per-image and set-wide values of one row."""
        row = self._row(name)
        pairs = pair(baseline, run)
        file = ScoreFile.open(self.out / "scores" / f"{name}.json", pairs, self.tools.process)
        prompts = {item.key: item.prompt_id for item in run.items.values()}
        todo = []
        for metric in self.metrics:
            if metric.needs == "time" or (name == BASELINE and metric.needs in ("pair", "sets")):
                continue
            reason = self._withheld(metric, run)
            if reason is not None:
                row["values"][metric.name] = {"mean": None, "n": len(run.items), "withheld": reason}
            else:
                todo.append(metric)
        with self.stage(f"{row['label']}: scores") as self.tools.on_progress:
            missing = [m for m in todo if m.needs == "pair" and file.get(m, self.tools) is None]
            if missing:
                file.put(pair_values(missing, pairs, self.tools), self.tools)
            for metric in todo:
                if metric.needs == "image" and file.get(metric, self.tools) is None:
                    file.put({metric.name: image_values(metric, run, self.tools)}, self.tools)
                if metric.needs in ("pair", "image"):
                    values = file.get(metric, self.tools)
                    if self.tools.process.is_main and values is not None:
                        row["values"][metric.name] = mean_value(metric, values, prompts, self.tools)
                        row["per_image"][metric.name] = values
                else:
                    row["values"][metric.name] = set_value(metric, run, baseline, self.reference, self.tools)
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
            if note not in self.results["notes"]:
                self.results["notes"].append(note)
            return f"not measured: no weights of {name}"
        return withheld_by(metric, network, self.reference)

    def _compare_rows(self, baseline: Run) -> None:
        """P-values: fidelity against tomesd at 50 %, quality per image against the baseline."""
        prompts = {item.key: item.prompt_id for item in baseline.items.values()}
        for row in self._measured():
            for name, values in row["per_image"].items():
                against = RIVAL if METRICS[name].needs == "pair" else BASELINE
                other = next((other for other in self._measured() if other["name"] == against), None)
                if other is None or row is other or name not in other["per_image"]:
                    continue
                difference = paired_difference(values, other["per_image"][name], prompts)
                row["values"][name].update(p=difference["p"], against=against, difference=difference)
        self._save()

    def _check(self, baseline: Run) -> None:
        """The sanity gates."""
        found = [row["values"] for row in self._measured() if row["name"] != BASELINE]
        chosen = [metric for metric in self.metrics if metric.name in CEILING]
        known = [m for m in chosen if found and not any(values.get(m.name, {}).get("withheld") for values in found)]
        with self.stage("sanity gates") as self.tools.on_progress:
            if self.tools.process.is_main:
                batches = cut_batches(jobs_of(self.prompts, self.settings), self.settings.batch_size)[:GATE_BATCHES]
                self.results["gates"] = repeat_gates(self.model, self.settings, batches, baseline, MaMeConfig())
            self.tools.process.wait()
            gate = ceiling_gate(baseline, known, found, self.tools)
            self.results["gates"] += [] if gate is None else [gate]
        self.results["manifest"]["networks"] = self.tools.about()
        cut, prompts = cut_prompts(self.metrics, baseline, self.tools)
        if cut:
            self.results["notes"].append(f"CLIP read {cut} of {prompts} prompts only in part (77 tokens).")
        self._save()

    def _time(self) -> None:
        """Latency, memory, and tokens kept per step; on the main process, while the others wait."""
        if not self.tools.process.is_main:
            return
        jobs = jobs_of(self.prompts, self.settings)
        batches = alike_batches(jobs, self.settings.batch_size)
        methods = [method for method in self.methods if self._row(method.name)["status"] == "measured"]
        with self.stage("latency and memory") as on_progress:
            timings = bench(self.model, self.settings, batches, methods, self.rounds, self.out / TIMINGS, on_progress)
        for method in methods:
            costs = summary(timings[method.name])
            self._row(method.name)["values"].update({m.name: costs[m.name] for m in self.metrics if m.name in costs})
        self._save()
        with self.stage("tokens kept per step") as on_progress:
            for number, method in enumerate(methods, 1):
                row = self._row(method.name)
                row["kept"] = row["kept"] or kept_per_step(self.model, self.settings, jobs[0], method)
                on_progress(number, len(methods))
        self._save()

    def _row(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(row for row in self.results["rows"] if row["name"] == name)
        return found

    def _measured(self) -> list[dict[str, Any]]:
        return [row for row in self.results["rows"] if row["status"] == "measured"]

    def _save(self) -> None:
        if self.tools.process.is_main:
            write_results(self.out, self.results)


def resumed(results: dict[str, Any], out: Path) -> dict[str, Any]:
    """`results` with the rows that an earlier start of the same benchmark has left in `out`: what was made, no figures.

    Figures come back from bench.jsonl, scores/ and features/, which know what they are of: another reference or other
    weights can't be mixed with these.

    Raises UserError when `out` was begun with another model, other settings or prompts: its results stay as they are.
    """
    try:
        before = read_results(out)
    except UserError:
        return results
    try:
        there, here = (
            {"model": it["model"], **it["sampling"], "prompts": it["prompts"]["sha256"]}
            for it in (before["manifest"], results["manifest"])
        )
        rows = {row["name"]: (row["config"], row) for row in before["rows"] if row["status"] == "measured"}
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{out}: expected the results of a benchmark, got some without {error}; delete results.json and run again, "
            "nothing else is lost"
        ) from None
    different = differences(there, here)
    if different:
        raise UserError(
            f"--out {out}: expected the settings it was begun with, got {'; '.join(different)}; choose another --out, or "
            "give the same settings"
        )
    kept = []
    for row in results["rows"]:
        config, found = rows.get(row["name"], (None, {}))
        kept.append({**row, **found, "values": {}, "per_image": {}} if config == row["config"] else row)
    return {**results, "rows": kept}


def failed_gates(results: Mapping[str, Any]) -> list[str]:
    """Names of the gates that did not pass."""
    return [gate["name"] for gate in results["gates"] if not gate["passed"]]
