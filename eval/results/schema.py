"""Define the schema of a benchmark's results.

`benchmark` fills it in, the report shows it, and results.json holds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FORMAT = "mame-sd benchmark 2"
NOT_YET = "not yet: the benchmark has not reached it"
UNABLE = "NO"  # the verdict on a model and prompts that can't distinguish methods
_ALWAYS = ("mean", "low", "high", "n")  # fields of a value that are written even if they are null

Better = Literal["lower", "higher"]
Block = Literal["cost", "fidelity", "quality"]
Family = Literal["baseline", "tomesd", "mame", "rival", "floor"]


def without_nulls(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON has them."""
    return {name: value for name, value in pairs if name in _ALWAYS or value is not None}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One metric as a table shows it: `digits` after the decimal point, and a text `about` it."""

    name: str
    label: str
    better: Better
    block: Block
    unit: str = ""
    digits: int = 3
    about: str = ""

    @property
    def arrow(self) -> str:
        """Return the arrow that says which values are better."""
        return "↓" if self.better == "lower" else "↑"


@dataclass(frozen=True, kw_only=True)
class Value:
    """One measured value, or the reason why it is withheld.

    Attributes:
        mean: the value. If None, it is withheld or wasn't measured.
        low: lower end of its interval, if it has one.
        high: upper end of its interval, if it has one.
        p: P-value of the comparison with the row `against`.
        against: name of a row.
        equal: number of images that equal the baseline's; `mean` excludes them.
        std: standard deviation over `splits` parts of the images.
        warning: what must be said with the value because it may mislead.
        note: what else must be said with it.
        difference: difference from the row `against`, or from the other run.
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
    warning: str | None = None
    note: str | None = None
    difference: Mapping[str, Any] | None = None

    @property
    def known(self) -> bool:
        """Return True if there is a value."""
        return self.mean is not None and self.withheld is None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return (low, high), or None if the value lacks one of them."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def equal_note(self) -> str:
        """Say how many images equal the baseline's and are left out of the mean, or return ""."""
        if not self.equal:
            return ""
        others = self.mean is not None and math.isfinite(self.mean)
        return f"{self.equal} of {self.n} equal{', mean of the others' * others}"

    @property
    def remark(self) -> str:
        """Say what must stand next to the value, such as how it misleads, or return ""."""
        parts = [self.warning, self.note, (self.difference or {}).get("note")]
        if self.splits is not None:
            parts.append(f"{self.splits} split{'s' * (self.splits != 1)}")
        if self.std:
            parts.append("± is the standard deviation over them")
        if self.cap is not None:
            parts.append(f"at most {self.cap:g}")
        return "; ".join(dict.fromkeys(part for part in parts if part))

    def to_json(self) -> dict[str, Any]:
        """Return its JSON values."""
        return asdict(self, dict_factory=without_nulls)


@dataclass(kw_only=True)
class MethodResult:
    """One method: a line of the tables, filled in as it is measured.

    Attributes:
        config: its settings as JSON values; a resumed benchmark reuses only rows of equal settings.
        run: its folder relative to that of results.json, or None.
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

    def value(self, metric: Column | None) -> Value | None:
        """Return the row's known value of `metric`, or None."""
        value = None if metric is None else self.values.get(metric.name)
        return value if value is not None and value.known else None


@dataclass(frozen=True)
class Picture:
    """What an image was made from; its file is images/<key>.png of every run."""

    key: str
    prompt: str
    seed: int | None = None


@dataclass(frozen=True)
class Gate:
    """One sanity check of the benchmark itself."""

    name: str
    expected: str
    got: str
    passed: bool


@dataclass(kw_only=True)
class Results:
    """All results of a benchmark so far; a report is made from them alone.

    Attributes:
        manifest: what the figures depend on, as JSON values.
        metrics: the metrics in the order of columns.
        pictures: what the images of each run are of.
        reference: name of the set that quality is measured against.
        sensitivity: whether the model and the prompts can distinguish methods.
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
    sensitivity: str = ""

    def row(self, name: str) -> MethodResult:
        """Return the row of that name."""
        return next(row for row in self.rows if row.name == name)

    @property
    def images(self) -> int:
        """Return the number of images of each row."""
        return len(self.pictures)

    @property
    def measured(self) -> list[MethodResult]:
        """Return the rows that are measured."""
        return [row for row in self.rows if row.measured]

    @property
    def failed(self) -> list[Gate]:
        """Return the failed gates, which make every figure doubtful."""
        return [gate for gate in self.gates if not gate.passed]

    @property
    def warning(self) -> str:
        """Say that the images can't distinguish methods, or return ""."""
        verdict, _, figures = self.sensitivity.partition("? ")[2].partition(". ")
        if not verdict.startswith(UNABLE):
            return ""
        return (
            "This model and these prompts can't distinguish methods, so distances in this report"
            f" rank no method. {figures}"
        )

    def block(self, name: str) -> list[Column]:
        """Return the metrics of one block, in column order."""
        return [metric for metric in self.metrics if metric.block == name]

    def to_json(self) -> dict[str, Any]:
        """Return the content of results.json."""
        return {"format": FORMAT, **asdict(self, dict_factory=without_nulls)}
