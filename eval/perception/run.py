"""Run a classification benchmark: answers of every row, speed and checks.

    OUT/answers/, OUT/bench.jsonl      see `answers`
    OUT/results.json                   all results so far, rewritten after each step
    OUT/report.html                    made from results.json

Every step continues where it was stopped, so the same command resumes a run.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mame_sd.runs.generate import environment
from mame_sd.runs.merging import NotApplicable

from ..benchmark.results import TIMINGS, resumed, write_results
from ..benchmark.timings import of_rounds, summary
from ..metric_list import METRICS, Metric, cost, fidelity, quality
from ..results.schema import Gate, Results, Value
from ..runner import Stage
from ..stats import mcnemar_p, wilson
from .answers import Asked, Batch, answers_of, speed_of
from .methods import RIVALS, Method, at_flops
from .rows import BASELINE, SUITES, Row

UNLABELLED = Value(withheld="the images have no labels")
NEAR = 0.02  # of its FLOPs that a rival may miss without a note
_FLOPS = (
    "Multiply-adds of the vision transformer for one image, merging's own included: counted as"
    " tokens pass, mean over all images."
)
_THROUGHPUT = (
    "Images per second from prepared images to logits: median and quartiles of interleaved rounds."
)
_TOKENS = "After the last block, prefix tokens included, mean over all images."
_AGREEMENT = "Share of images whose answer is the unmerged model's, with Wilson's 95 % interval."
_TOP1 = (
    "Share of images whose answer is their label, with Wilson's 95 % interval; p of McNemar's exact"
    " test against the unmerged model."
)
COLUMNS: tuple[Metric, ...] = (
    cost("flops", "FLOPs", "G", 2, _FLOPS, needs="alone"),
    cost("throughput", "Throughput", "images/s", 1, _THROUGHPUT, better="higher"),
    METRICS["speedup"],
    METRICS["memory"],
    cost("tokens", "Tokens left", "", 1, _TOKENS, needs="alone"),
    fidelity("agreement", "Agreement", "higher", _AGREEMENT, unit="%", digits=2),
    quality("top1", "Top-1", "image", _TOP1, unit="%", digits=2),
)


@dataclass(kw_only=True)
class Classification:
    """One benchmark, which `run` executes.

    Attributes:
        suite: name of the suite.
        asked: the model, the images that it answers, and the size of a batch.
        about: how it answers, as JSON values: class names and templates, or where labels come from.
        rows: the first one is the baseline, and each rival follows the row whose FLOPs it takes.
        rounds: number of rounds of timing.
        out: folder of results.
        stage: opens a step of that name and returns its progress callback.
        command: the command that makes it again, for the report.
        results: the results so far.
    """

    suite: str
    asked: Asked
    about: Mapping[str, Any]
    rows: Sequence[Row]
    rounds: int
    out: Path
    stage: Stage
    command: str = ""
    results: Results = field(init=False)
    _methods: dict[str, Method] = field(default_factory=dict)
    _found: dict[str, list[Batch]] = field(default_factory=dict)

    def run(self) -> Results:
        """Run everything in order.

        Returns:
            The results, which are those of results.json.

        Raises:
            UserError, MachineError: what was done before is kept; the same call continues.
        """
        self.results = resumed(self._before(), self.out, settings_of)
        self._save()
        for row in self.rows:
            self._answer(row)
        self._time()
        self._check()
        return self.results

    def _before(self) -> Results:
        """Return the results before anything is measured."""
        encoder, images = self.asked.head.encoder, self.asked.images
        about, labelled = images.about(), images.labels is not None
        rows = [
            row.line({"rival": row.rival, "at": row.at} if row.at else row.method.config)
            for row in self.rows
        ]
        manifest = {
            "suite": self.suite,
            "command": self.command,
            "model": dict(encoder.identity),
            "images": about,
            "answers": dict(self.about),
            "batch": self.asked.size,
            "timing": {
                "rounds": self.rounds,
                "batch": len(self.asked.batches[0]),
                "images": "another batch each round",
            },
            "environment": {
                **environment(encoder.device),
                "attention": getattr(encoder.model.config, "_attn_implementation", None),
            },
        }
        return Results(
            kind="classification",
            suite=self.suite,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            manifest=manifest,
            metrics=COLUMNS,
            rows=rows,
            reference=f"the labels of {about['name']}" if labelled else None,
            reference_n=about["images"] if labelled else None,
            notes=[f"Suite {self.suite}. {SUITES[self.suite][0]}"],
        )

    def _answer(self, row: Row) -> None:
        """Compute the answers of a row and its figures, or the reason why there are none."""
        line = self.results.row(row.name)
        try:
            method = self._solved(row) if row.at else row.method
            with self.stage(f"{row.label}: answers") as on_progress:
                batches = answers_of(
                    self.asked,
                    method,
                    self.out / "answers" / f"{row.name}.jsonl",
                    {**settings_of(self.results.manifest), "method": method.config},
                    on_progress,
                )
        except NotApplicable as error:
            line.measured, line.reason = False, str(error)
        else:
            self._methods[row.name], self._found[row.name] = method, batches
            line.measured, line.reason = True, None
            line.values.update(self._values(row.name))
        self._save()

    def _solved(self, row: Row) -> Method:
        """Return the rival at the FLOPs that were counted for another row."""
        assert row.rival is not None
        if row.at not in self._found:
            raise NotApplicable(
                f"expected the FLOPs of {row.at}, which was not measured; measure it first"
            )
        target = self._flops(row.at) * 1e9
        head, inputs = self.asked.head, self.asked.inputs([0])
        pixels = inputs["pixel_values"]
        side = int(pixels.shape[-1]) if pixels.dim() in (4, 5) else 0  # 0: they are patches
        with self.stage(f"{row.label}: to {target / 1e9:.3g} GFLOPs"):
            call = partial(head.logits, inputs)
            knob, flops = at_flops(head.encoder.model, row.rival, target, call, side)
        if abs(flops / target - 1) > NEAR:
            got, wanted = f"{flops / 1e9:.3g}", f"{target / 1e9:.3g}"
            self.results.notes.append(
                f"{row.label}: {got} GFLOPs is the nearest it can come to {wanted}."
            )
        return RIVALS[row.rival].make(knob)

    def _values(self, name: str) -> dict[str, Value]:
        """Return the figures that follow from a row's answers, tokens and FLOPs."""
        answers, plain = self._answers(name), self._answers(BASELINE)
        count = len(answers)

        def mean(value: Callable[[Batch], float]) -> Value:
            """Return the mean over images of a value of their batches."""
            total = sum(value(batch) * len(batch.answers) for batch in self._found[name])
            return Value(mean=total / count, n=count)

        values = {
            "flops": mean(lambda batch: batch.flops / 1e9),
            "tokens": mean(lambda batch: batch.tokens[-1]),
            "top1": UNLABELLED,
        }
        if name != BASELINE:
            same = sum(a == b for a, b in zip(answers, plain, strict=True))
            values["agreement"] = Value(**wilson(same, count))
        if (right := self._right(name)) is not None:
            values["top1"] = Value(**wilson(sum(right), count))
            if name != BASELINE:
                p = mcnemar_p(right, self._right(BASELINE) or [])
                values["top1"] = replace(values["top1"], p=p, against=BASELINE)
        return values

    def _answers(self, name: str) -> list[int]:
        return [answer for batch in self._found[name] for answer in batch.answers]

    def _right(self, name: str) -> list[bool] | None:
        """Return whether each answer is its image's label; None without labels."""
        labels = self.asked.images.labels
        if labels is None:
            return None
        return [a == label for a, label in zip(self._answers(name), labels, strict=True)]

    def _flops(self, name: str) -> float:
        """Return the GFLOPs of a row that was measured."""
        return self.results.row(name).values["flops"].mean or 0.0

    def _time(self) -> None:
        """Measure speed and memory."""
        about = {
            **settings_of(self.results.manifest),
            "environment": self.results.manifest["environment"],
            "methods": {name: method.config for name, method in self._methods.items()},
        }
        with self.stage("speed and memory") as on_progress:
            record = self.out / TIMINGS
            timings = speed_of(self.asked, self._methods, self.rounds, record, about, on_progress)
        for name, taken in timings.items():
            values = self.results.row(name).values
            values["throughput"] = of_rounds([1 / timing.seconds for timing in taken])
            costs = summary(taken, timings[BASELINE])
            values.update({key: costs[key] for key in ("speedup", "memory") if key in costs})
        self._save()

    @torch.no_grad()
    def _check(self) -> None:
        """Check that rows leave the model as it was, and that inactive merging changes nothing."""
        head, inputs = self.asked.head, self.asked.inputs(self.asked.batches[0])
        plain = head.logits(inputs)

        def gate(name: str, got: torch.Tensor) -> Gate:
            largest = (got - plain).abs().max().item()
            return Gate(name, "logits equal to the bit", f"{largest:g} apart", largest == 0)

        gates = []
        for name, method in self._methods.items():
            with method.counting(head.encoder.model) as handle:
                handle.active = not method.merges
                logits = head.logits(inputs)
            if name == BASELINE:
                gates.append(gate(f"{name}, counted", logits))
            elif method.merges:
                gates.append(gate(f"{name}, switched off", logits))
        self.results.gates = [*gates, gate("the model after all rows", head.logits(inputs))]
        self._save()

    def _save(self) -> None:
        write_results(self.out, self.results)


def settings_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a benchmark must be continued with.

    Sizes of files are left out: a batch whose file was corrected is answered again.
    """
    images = {key: value for key, value in manifest["images"].items() if key != "sha256"}
    return {**{key: manifest[key] for key in ("model", "answers", "batch")}, "images": images}
