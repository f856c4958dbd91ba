"""A classification benchmark from images to results: answers of every row, speed, checks, and all
of it written down.

    OUT/answers/<row>.<rank>.jsonl     the answer to every image
    OUT/bench.jsonl                    every timing
    OUT/results.json                   everything that is known so far, rewritten after each step
    OUT/report.html, ...               made of results.json

Every step continues where it was stopped, so the same command does.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mame_sd.runs.generate import environment_on
from mame_sd.runs.methods import NotApplicable
from mame_sd.runs.processes import Process

from ..benchmark.results import TIMINGS, resumed, write_results
from ..benchmark.timings import summary
from ..metric_list import Metric
from ..results.schema import NOT_YET, Gate, Results, Value
from ..results.schema import Row as Line
from ..stats import mean_interval, share_difference, wilson
from .answers import Batches, answers_of, inputs_of, weighted
from .columns import COLUMNS
from .data import ImageSet
from .heads import Head
from .methods import RIVALS, Merged, Method, at_flops, side_of
from .neighbours import NearestHead
from .rows import BASELINE, SUITES, Row
from .speed import measure, throughput

Stage = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
UNLABELLED = Value(withheld="the images have no labels")
TOME = "tome"  # the rival that rows at its FLOPs are compared with
NEAR = 0.02  # of its FLOPs that a rival may miss without a note


@dataclass(kw_only=True)
class Classification:
    """One benchmark; `run` does it.

    Attributes:
        suite: name of the suite.
        head: the model and how it answers.
        images: what it answers.
        numbers: the model's number of each class folder; None: no labels.
        head_about: how it answers, as JSON values: class names and templates, or where labels come
            from.
        rows: the first is the baseline, and each rival comes after the row whose FLOPs it takes.
        size: of a batch.
        rounds: of timing.
        stage: opens a step of that name and gives its progress callback.
        command: what makes it again, for the report.
        results: what is known so far.
    """

    suite: str
    head: Head
    images: ImageSet
    numbers: Sequence[int] | None
    head_about: Mapping[str, Any]
    rows: Sequence[Row]
    size: int
    rounds: int
    out: Path
    process: Process
    stage: Stage
    command: str = ""
    results: Results = field(init=False)
    _methods: dict[str, Method] = field(default_factory=dict)

    def run(self) -> Results:
        """Everything, in order; returns the results, on the main process those of results.json.

        Raises:
            UserError, MachineError: what was done before is kept; the same call continues.
        """
        self.results = resumed(self.results_before(), self.out, settings_of)
        self._save()
        found: dict[str, Batches] = {}
        for row in self.rows:
            batches = self._answer(row)
            if batches is not None:
                found[row.name] = batches
                self._value(row.name, found)
        self._compare(found)
        if self.process.is_main:
            self._time()
            self._check()
        self.process.wait()
        return self.results

    @property
    def columns(self) -> dict[str, Metric]:
        """Those of the table."""
        lacking = {"ahead"} - ({"ahead"} if self._meets_tome else set())
        if not isinstance(self.head, NearestHead):
            lacking |= {"class_token", "patches"}
        return {name: metric for name, metric in COLUMNS.items() if name not in lacking}

    @property
    def labels(self) -> Sequence[int] | None:
        """The number of the class folder of each image that is answered; None without labels."""
        return self.images.labels

    def results_before(self) -> Results:
        """What is known before anything is measured."""
        rows = [
            Line(
                name=row.name,
                label=row.label,
                family=row.family,
                default=row.default,
                config={"rival": row.rival, "at": row.at} if row.at else row.method.describe(),
                reason=NOT_YET,
            )
            for row in self.rows
        ]
        about = self.images.about()
        labelled = self.numbers is not None
        return Results(
            kind="classification",
            suite=self.suite,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            manifest={
                "suite": self.suite,
                "command": self.command,
                "model": dict(self.head.encoder.identity),
                "images": about,
                "answers": dict(self.head_about),
                "batch": self.size,
                "timing": {
                    "rounds": self.rounds,
                    "batch": min(self.size, len(self.images.files)),
                    "images": "another batch each round",
                },
                "environment": {
                    **environment_on(self.head.encoder.device),
                    "processes": self.process.count,
                    "attention": getattr(
                        self.head.encoder.model.config, "_attn_implementation", None
                    ),
                },
            },
            metrics=list(self.columns.values()),
            rows=rows,
            reference=f"the labels of {about['name']}" if labelled else None,
            reference_n=about["images"] if labelled else None,
            notes=[f"Suite {self.suite}. {SUITES[self.suite][0]}"],
        )

    def _answer(self, row: Row) -> Batches | None:
        """The answers of a row; None where it can do nothing with this model."""
        line = self.results.row(row.name)
        try:
            method = self._solved(row, line) if row.at else row.method
            with self.stage(f"{row.label}: answers") as on_progress:
                batches = self._batches(row, method, on_progress)
        except NotApplicable as error:
            line.measured, line.reason = False, str(error)
            self._save()
            return None
        self._methods[row.name] = method
        line.measured, line.reason = True, None
        return batches

    def _batches(
        self, row: Row, method: Method, on_progress: Callable[[int, int], object]
    ) -> Batches:
        return answers_of(
            self.head,
            method,
            self.images,
            self.size,
            self.out / "answers" / f"{row.name}.jsonl",
            {**settings_of(self.results.manifest), "method": method.describe()},
            self.process,
            on_progress,
        )

    def _solved(self, row: Row, line: Line) -> Method:
        """The rival at the FLOPs that were counted of another row."""
        assert row.rival is not None
        other = next((one for one in self._measured() if one.name == row.at), None)
        if other is None:
            raise NotApplicable(
                f"expected the FLOPs of {row.at}, which was not measured; measure it first"
            )
        target = _flops(other) * 1e9
        solved = line.solved
        if solved is None or solved["target"] != target:
            inputs = inputs_of(self.head, self.images, [0])
            model, call = self.head.encoder.model, partial(self.head.logits, inputs)
            with self.stage(f"{row.label}: to {target / 1e9:.3g} GFLOPs"):
                knob, flops = at_flops(model, row.rival, target, call, side_of(inputs))
            solved = line.solved = {"target": target, "knob": knob, "flops": flops}
        if abs(solved["flops"] / target - 1) > NEAR:
            note = (
                f"{row.label}: {solved['flops'] / 1e9:.3g} GFLOPs is the nearest it can come to"
                f" {target / 1e9:.3g}."
            )
            self.results.notes += [note] if note not in self.results.notes else []
        return RIVALS[row.rival].make(solved["knob"])

    def _value(self, name: str, found: Mapping[str, Batches]) -> None:
        """What answers, tokens and FLOPs of a row come to."""
        values, batches = self.results.row(name).values, found[name]
        answers, plain = (_answers(found[one]) for one in (name, BASELINE))
        count = len(answers)
        flops = weighted(batches, lambda batch: batch.flops) / 1e9
        values["flops"] = Value(mean=flops, n=count)
        depth = len(next(iter(batches.values())).tokens)
        tokens = [weighted(batches, lambda batch, at=at: batch.tokens[at]) for at in range(depth)]  # type: ignore[misc]
        values["tokens"] = Value(mean=tokens[-1], n=count)
        if name != BASELINE:
            values["agreement"] = self._share([a == b for a, b in zip(answers, plain, strict=True)])
            for column in next(iter(batches.values())).near:
                every = [one for _, batch in sorted(batches.items()) for one in batch.near[column]]
                keys = {str(place): str(place) for place in range(len(every))}
                values[column] = Value(**mean_interval(dict(zip(keys, every, strict=True)), keys))
        values["top1"] = self._top1(name, found)
        self._save()

    def _share(self, flags: Sequence[bool]) -> Value:
        """The share of images that are as they should be, in per cent."""
        return Value(**wilson(sum(flags), len(flags)))

    def _top1(self, name: str, found: Mapping[str, Batches]) -> Value:
        right = self._right(found[name])
        if right is None:
            return UNLABELLED
        value = self._share(right)
        if name == BASELINE:
            return value
        p = share_difference(right, self._right(found[BASELINE]) or [])["p"]
        return replace(value, p=p, against=BASELINE)

    def _compare(self, found: Mapping[str, Batches]) -> None:
        """How far each row's top-1 is ahead of ToMe's at its FLOPs."""
        if not self._meets_tome:
            return
        for row in self.rows:
            if row.name in found:
                self.results.row(row.name).values["ahead"] = self._ahead(
                    row, f"{TOME}@{row.at or row.name}", found
                )
        self._save()

    def _ahead(self, row: Row, other: str, found: Mapping[str, Batches]) -> Value:
        right = self._right(found[row.name])
        if right is None:
            return UNLABELLED
        if row.name == other or other not in found:
            reason = "ToMe itself" if row.rival == TOME else "no ToMe at its FLOPs"
            return Value(withheld=reason)
        mine, its = (self.results.row(name) for name in (row.name, other))
        flops = _flops(mine), _flops(its)
        note = f"{mine.label} at {flops[0]:.3g} GFLOPs, {its.label} at {flops[1]:.3g}"
        return Value(
            **share_difference(right, self._right(found[other]) or []),
            against=other,
            note=note if abs(flops[1] / flops[0] - 1) > NEAR else None,
        )

    @property
    def _meets_tome(self) -> bool:
        """Whether ToMe runs at the FLOPs of some row."""
        return any(row.rival == TOME and row.at for row in self.rows)

    def _right(self, batches: Batches) -> list[bool] | None:
        """Whether each answer is its image's label; None without labels."""
        labels, numbers = self.labels, self.numbers
        if labels is None or numbers is None:
            return None
        return [
            answer == numbers[label]
            for answer, label in zip(_answers(batches), labels, strict=True)
        ]

    def _time(self) -> None:
        """Speed and memory, on the main process while the others wait."""
        about = {
            **settings_of(self.results.manifest),
            "environment": self.results.manifest["environment"],
            "methods": {name: method.describe() for name, method in self._methods.items()},
        }
        with self.stage("speed and memory") as on_progress:
            timings = measure(
                self.head,
                self._methods,
                self.images,
                self.size,
                self.rounds,
                self.out / TIMINGS,
                about,
                on_progress,
            )
        for name, found in timings.items():
            values = self.results.row(name).values
            values["throughput"] = throughput(found)
            values.update({key: value for key, value in summary(found).items() if key == "memory"})
        self._save()

    @torch.no_grad()
    def _check(self) -> None:
        """The sanity gates: rows leave the model as it was, and merging that is switched off
        changes nothing.
        """
        inputs, model = (
            inputs_of(self.head, self.images, self.images.batches(self.size)[0]),
            self.head.encoder.model,
        )
        plain = self.head.logits(inputs)
        gates = []
        for name, method in self._methods.items():
            with method.counted(model) as handle:
                handle.active = not isinstance(method, Merged)
                merged = self.head.logits(inputs)
            if isinstance(method, Merged) or name == BASELINE:
                gates.append(
                    _equal(
                        f"{name}, {'counted' if name == BASELINE else 'switched off'}",
                        merged,
                        plain,
                    )
                )
        gates.append(_equal("the model after all rows", self.head.logits(inputs), plain))
        self.results.gates = gates
        self._save()

    def _measured(self) -> list[Line]:
        return [row for row in self.results.rows if row.values.get("flops")]

    def _save(self) -> None:
        if self.process.is_main:
            write_results(self.out, self.results)


def settings_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a benchmark must be continued with.

    Sizes of files are left out: a batch whose file was mended is answered anew.
    """
    images = {key: value for key, value in manifest["images"].items() if key != "sha256"}
    return {**{key: manifest[key] for key in ("model", "answers", "batch")}, "images": images}


def _answers(batches: Batches) -> list[int]:
    return [answer for _, batch in sorted(batches.items()) for answer in batch.answers]


def _flops(row: Line) -> float:
    """GFLOPs of a row that was measured."""
    found = row.values["flops"].mean
    assert found is not None
    return found


def _equal(name: str, got: torch.Tensor, wanted: torch.Tensor) -> Gate:
    largest = (got - wanted).abs().max().item()
    return Gate(name, "logits equal to the bit", f"{largest:g} apart", largest == 0)
