"""The one schema of a benchmark's results: what `benchmark` and `perception` fill in, results.json
holds and the report reads.

`to_json` gives the content of results.json, `eval.results.read.parse` reads it back, checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any, Literal

from mame_sd.errors import UserError

FORMAT = "mame-sd benchmark 2"
NOT_YET = "not yet: the benchmark has not come to it"
_ALWAYS = ("mean", "low", "high", "n")  # of a value, also where they are null

Better = Literal["lower", "higher"]
Block = Literal["cost", "fidelity", "quality"]
Family = Literal["baseline", "tomesd", "mame", "tome", "rival", "floor"]
Kind = Literal["generation", "classification"]


def without_nulls(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of a dataclass as JSON has them."""
    return {name: value for name, value in pairs if name in _ALWAYS or value is not None}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One metric as a table shows it; `digits` are those after the decimal point."""

    name: str
    label: str
    better: Better
    block: Block
    unit: str = ""
    digits: int = 3
    about: str = ""

    @property
    def arrow(self) -> str:
        return "↓" if self.better == "lower" else "↑"


@dataclass(frozen=True, kw_only=True)
class Value:
    """One measured value, or the reason why it is withheld.

    Attributes:
        low, high: its interval; None: there is none.
        n: of how many images or rounds.
        p: of its comparison with row `against`.
        withheld: why there is no value.
        equal: how many images are the baseline's; they are left out of `mean`.
        std: over `splits` parts of the images.
        cap: the largest possible value.
        statistic: what mean, low and high are, where it is no mean with its interval.
        warning, note: what must be said beside it.
        difference: from row `against`, or from the other run.
    """

    mean: float | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    p: float | None = None
    against: str | None = None
    withheld: str | None = None
    equal: int | None = None
    std: float | None = None
    splits: int | None = None
    cap: float | None = None
    statistic: str | None = None
    warning: str | None = None
    note: str | None = None
    difference: Mapping[str, Any] | None = None

    @property
    def known(self) -> bool:
        return self.mean is not None and self.withheld is None

    @property
    def interval(self) -> tuple[float, float] | None:
        """(low, high), where it has both."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def equal_note(self) -> str:
        """How many images equal the baseline's and are left out of the mean; empty where none
        are.
        """
        if not self.equal:
            return ""
        others = self.mean is not None and math.isfinite(self.mean)
        return f"{self.equal} of {self.n} equal{', mean of the others' * others}"

    @property
    def remark(self) -> str:
        """What must be said beside the value wherever it is shown: how it came about, what it
        leaves out, how it misleads. Empty where there is nothing.
        """
        parts = [self.warning, self.note, (self.difference or {}).get("note")]
        if self.splits is not None:
            parts.append(f"{self.splits} split{'s' * (self.splits != 1)}")
        if self.std:
            parts.append("± is the standard deviation over them")
        if self.cap is not None:
            parts.append(f"at most {self.cap:g}")
        return "; ".join(dict.fromkeys(part for part in parts if part))

    def to_json(self) -> dict[str, Any]:
        return asdict(self, dict_factory=without_nulls)


@dataclass(kw_only=True)
class MethodResult:
    """One method: a line of the tables, filled in as it is measured.

    Attributes:
        config: its settings as JSON values; a resumed benchmark takes only rows of equal ones.
        run: its folder, relative to that of results.json; None: it has none.
        reason: why it is not measured.
        values: by metric.
        per_image: by metric, then by image.
        solved: of a rival at another row's FLOPs: the target, the knob and the FLOPs that it gave.
    """

    name: str
    family: Family
    label: str
    default: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    run: str | None = None
    reason: str | None = None
    measured: bool = False
    values: dict[str, Value] = field(default_factory=dict)
    per_image: dict[str, Mapping[str, float]] = field(default_factory=dict)
    solved: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        """Raises UserError for a run outside the folder of results.json."""
        run = PurePath(self.run or "")
        if run.is_absolute() or ".." in run.parts:
            raise UserError(
                f"row {self.name!r}: expected run to be a folder inside, got {run}; correct it"
            )

    def value(self, metric: Column | None) -> Value | None:
        """The row's known value of `metric`, None where it has none."""
        found = None if metric is None else self.values.get(metric.name)
        return found if found is not None and found.known else None


@dataclass(frozen=True)
class Picture:
    """What an image was made from; its file is images/<key>.png of every run."""

    key: str
    prompt: str
    seed: int | None = None


@dataclass(frozen=True)
class Gate:
    """One sanity check of the benchmark itself.

    `withholds`: where it fails, what it is about is left out.
    """

    name: str
    expected: str
    got: str
    passed: bool
    withholds: bool = False


@dataclass(kw_only=True)
class Results:
    """Everything that is known of a benchmark so far; all that a report is made of.

    Attributes:
        created: when, in ISO 8601.
        manifest: what the figures depend on, as JSON values.
        metrics: in the order of columns.
        pictures: what the images of each run are of.
        reference, reference_n: the set that quality is against, and its size.
        sensitivity: whether the model and the prompts can tell methods apart, in one sentence.
    """

    suite: str
    manifest: dict[str, Any]
    metrics: Sequence[Column]
    rows: list[MethodResult]
    created: str = ""
    pictures: Sequence[Picture] = ()
    gates: list[Gate] = field(default_factory=list)
    reference: str | None = None
    reference_n: int | None = None
    notes: list[str] = field(default_factory=list)
    kind: Kind = "generation"
    sensitivity: str = ""

    def row(self, name: str) -> MethodResult:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)

    @property
    def images(self) -> int:
        """How many images each row is of."""
        about = self.manifest.get("images")
        return int(about["images"]) if isinstance(about, Mapping) else len(self.pictures)

    @property
    def measured(self) -> list[MethodResult]:
        return [row for row in self.rows if row.measured]

    @property
    def failed(self) -> list[Gate]:
        """The gates that make every figure doubtful."""
        return [gate for gate in self.gates if not gate.passed and not gate.withholds]

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before the first figure, beside failed gates."""
        found = []
        if "FAILS" in self.sensitivity:
            found.append(
                "This model and these prompts can't tell methods apart, so distances in this report"
                " rank no method. " + self.sensitivity.partition(". ")[2]
            )
        if any(gate.withholds and not gate.passed for gate in self.gates):
            found.append(
                "Seconds are withheld: the machine was busy, or timed one round only. "
                "Run the same command again on a machine with nothing else to do."
            )
        return found

    def block(self, name: str) -> list[Column]:
        """The metrics of one block, in column order."""
        return [metric for metric in self.metrics if metric.block == name]

    def to_json(self) -> dict[str, Any]:
        """The content of results.json."""
        return {"format": FORMAT, **asdict(self, dict_factory=without_nulls)}
