"""The one schema of a benchmark's results: what `benchmark` and `perception` fill in, results.json
holds and the report reads.

`to_json` gives the content of results.json, `eval.results.read.parse` reads it back, checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..remarks import remark

FORMAT = "mame-sd benchmark 1"
BLOCKS = ("cost", "fidelity", "quality")
FAMILIES = ("baseline", "tomesd", "mame", "tome", "rival", "floor")
KINDS = ("generation", "classification")
NOT_YET = "not yet: the benchmark has not come to it"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One metric as a table shows it.

    `better` is "lower" or "higher"; `block` one of `BLOCKS`; `digits` those after the decimal
    point.
    """

    key: str
    better: str
    block: str
    label: str = ""
    unit: str = ""
    digits: int = 3
    about: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.key)
        object.__setattr__(self, "digits", min(max(0, self.digits), 9))

    @property
    def arrow(self) -> str:
        return "↓" if self.better == "lower" else "↑"

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "key"}


@dataclass(frozen=True, kw_only=True)
class Value:
    """One measured value, or the reason why it is withheld.

    Attributes:
        low, high: its interval; None: there is none.
        n: of how many images or rounds.
        p: of its comparison with row `against`.
        withheld: why there is no value.
        equal: how many images are the baseline's; they are left out of `mean`.
        std: over subsets of images, or over splits.
        subsets, subset_size, splits, cap: what `std` is over, and the largest possible value.
        statistic: what mean, low and high are, where it is no mean with its interval.
        warning, note: what must be said beside it.
        seeds: the value of each training that the mean is over.
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
    subsets: int | None = None
    subset_size: int | None = None
    splits: int | None = None
    cap: float | None = None
    statistic: str | None = None
    warning: str | None = None
    note: str | None = None
    seeds: Sequence[float] | None = None
    difference: Mapping[str, Any] | None = None

    @property
    def known(self) -> bool:
        return self.mean is not None and self.withheld is None

    @property
    def remark(self) -> str:
        """Warning, notes, subsets, splits and cap in words; empty where there is nothing."""
        return remark(self.to_json())

    def to_json(self) -> dict[str, Any]:
        always = ("mean", "low", "high", "n")
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: value for k, value in found.items() if k in always or value is not None}


@dataclass(kw_only=True)
class Row:
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
    family: str
    label: str = ""
    default: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    run: str | None = None
    reason: str | None = None
    measured: bool = False
    values: dict[str, Value] = field(default_factory=dict)
    per_image: dict[str, Mapping[str, float]] = field(default_factory=dict)
    solved: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        self.label = self.label or self.name

    def value(self, metric: Column | None) -> Value | None:
        """The row's known value of `metric`, None where it has none."""
        found = None if metric is None else self.values.get(metric.key)
        return found if found is not None and found.known else None

    def to_json(self) -> dict[str, Any]:
        found = {
            "name": self.name,
            "label": self.label,
            "family": self.family,
            "default": self.default,
            "config": dict(self.config),
            "run": self.run,
            "status": "measured" if self.measured else "not measured",
            "reason": self.reason,
            "values": {name: value.to_json() for name, value in self.values.items()},
            "per_image": {name: dict(values) for name, values in self.per_image.items()},
        }
        return found | ({} if self.solved is None else {"solved": dict(self.solved)})


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
        kind: one of `KINDS`.
        sensitivity: whether the model and the prompts can tell methods apart, in one sentence.
    """

    suite: str
    manifest: dict[str, Any]
    metrics: Sequence[Column]
    rows: list[Row]
    created: str = ""
    pictures: Sequence[Picture] = ()
    gates: list[Gate] = field(default_factory=list)
    reference: str | None = None
    reference_n: int | None = None
    notes: list[str] = field(default_factory=list)
    kind: str = "generation"
    sensitivity: str = ""

    def row(self, name: str) -> Row:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)

    @property
    def images(self) -> int:
        """How many images each row is of."""
        about = self.manifest.get("images")
        return int(about["images"]) if isinstance(about, Mapping) else len(self.pictures)

    @property
    def measured(self) -> list[Row]:
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
        reference = {"name": self.reference, "n": self.reference_n}
        return {
            "format": FORMAT,
            "kind": self.kind,
            "suite": self.suite,
            "created": self.created,
            "manifest": self.manifest,
            "metrics": {metric.key: metric.to_json() for metric in self.metrics},
            "rows": [row.to_json() for row in self.rows],
            "images": {p.key: {"prompt": p.prompt, "seed": p.seed} for p in self.pictures},
            "gates": [asdict(gate) for gate in self.gates],
            "sensitivity": self.sensitivity,
            "reference": None if self.reference is None else reference,
            "notes": self.notes,
        }
