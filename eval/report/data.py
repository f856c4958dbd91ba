"""The content of results.json as values the rest of the report can trust: checked once, here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from mame_sd.errors import UserError

from ..remarks import remark
from .words import WORDS, Words

BLOCKS = ("cost", "fidelity", "quality")
AGAIN = "run the benchmark again"
FAMILIES = ("baseline", "tomesd", "mame", "tome", "rival", "floor")
PEERS = {
    "tomesd": "ToMeSD",
    "tome": "ToMe",
}  # families of the rows that the headline's is compared with


@dataclass(frozen=True)
class Metric:
    """One column.

    `better` is "lower" or "higher"; `block` one of `BLOCKS`; `digits` those after the decimal
    point.
    """

    key: str
    label: str
    unit: str
    better: str
    block: str
    digits: int
    about: str

    @property
    def arrow(self) -> str:
        return "↓" if self.better == "lower" else "↑"


@dataclass(frozen=True)
class Value:
    """One measured value with its interval, or the reason why it is withheld.

    `p` compares it with row `against`.

    `std` is over subsets of images or over splits, as the remark says; `equal` counts
    images that are the baseline's, left out of `mean`; `remark` is what must be said beside it.
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
    remark: str = ""

    @property
    def known(self) -> bool:
        return self.mean is not None and self.withheld is None


@dataclass(frozen=True)
class Kept:
    """Tokens that went into the self-attentions of one level at one step, and how many were
    kept.
    """

    step: int
    level: int
    tokens: float
    kept: float

    @property
    def share(self) -> float:
        return self.kept / self.tokens


@dataclass(frozen=True)
class Row:
    """One method: a line of the tables. `run` is its folder, relative to that of results.json."""

    name: str
    label: str
    family: str
    default: bool
    run: str | None
    reason: str | None
    measured: bool
    values: Mapping[str, Value] = field(default_factory=dict)
    per_image: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    kept: Sequence[Kept] = ()

    def value(self, metric: Metric | None) -> Value | None:
        """The row's known value of `metric`, None where it has none."""
        found = None if metric is None else self.values.get(metric.key)
        return found if found is not None and found.known else None


@dataclass(frozen=True)
class Picture:
    """What an image was made from; its file is images/<key>.png of every run."""

    key: str
    prompt: str
    seed: int | None


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


@dataclass(frozen=True)
class Results:
    """Everything a report is made of."""

    suite: str
    created: str
    manifest: Mapping[str, Any]
    metrics: Sequence[Metric]
    rows: Sequence[Row]
    pictures: Sequence[Picture]
    gates: Sequence[Gate]
    reference: str | None
    reference_n: int | None
    notes: Sequence[str]
    kind: str = "generation"
    sensitivity: str = ""

    @property
    def words(self) -> Words:
        """Of its kind."""
        return WORDS[self.kind]

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

    def block(self, name: str) -> list[Metric]:
        """The metrics of one block, in column order."""
        return [metric for metric in self.metrics if metric.block == name]


def parse(results: Mapping[str, Any]) -> Results:
    """`results` (the content of results.json), checked.

    Raises:
        UserError: naming the entry that is missing or of another kind.
    """
    top = "the top level"
    reference = _get(results, "reference", dict, top, {})
    return Results(
        suite=_get(results, "suite", str, top),
        created=_get(results, "created", str, top, ""),
        manifest=_get(results, "manifest", dict, top),
        metrics=[_metric(key, entry) for key, entry in _get(results, "metrics", dict, top).items()],
        rows=[
            _row(entry, f"rows[{n}]") for n, entry in enumerate(_get(results, "rows", list, top))
        ],
        pictures=[
            _picture(key, entry) for key, entry in _get(results, "images", dict, top, {}).items()
        ],
        gates=[
            _gate(entry, f"gates[{n}]")
            for n, entry in enumerate(_get(results, "gates", list, top, []))
        ],
        reference=_get(reference, "name", str, "reference", None),
        reference_n=_get(reference, "n", int, "reference", None),
        notes=[str(note) for note in _get(results, "notes", list, top, [])],
        kind=_one_of(_get(results, "kind", str, top, "generation"), tuple(WORDS), "kind"),
        sensitivity=_get(results, "sensitivity", str, top, ""),
    )


def _picture(key: str, entry: Any) -> Picture:
    where = f"images[{key!r}]"
    return Picture(key, _get(entry, "prompt", str, where), _get(entry, "seed", int, where, None))


def _metric(key: str, entry: Any) -> Metric:
    where = f"metrics[{key!r}]"
    better = _one_of(_get(entry, "better", str, where), ("lower", "higher"), f"{where}.better")
    block = _one_of(_get(entry, "block", str, where), BLOCKS, f"{where}.block")
    return Metric(
        key=key,
        label=_get(entry, "label", str, where, key) or key,
        unit=_get(entry, "unit", str, where, ""),
        better=better,
        block=block,
        digits=min(max(0, _get(entry, "digits", int, where, 3)), 9),
        about=_get(entry, "about", str, where, ""),
    )


def _row(entry: Any, where: str) -> Row:
    name = _get(entry, "name", str, where)
    where = f"row {name!r}"
    status = _one_of(
        _get(entry, "status", str, where), ("measured", "not measured"), f"{where}: status"
    )
    run = _get(entry, "run", str, where, None)
    if run is not None and (PurePosixPath(run).is_absolute() or ".." in Path(run).parts):
        raise UserError(
            f"results.json, {where}: expected run to be a folder inside, got {run!r}; {AGAIN}"
        )
    values = {
        key: _value(value, f"{where}: {key}")
        for key, value in _get(entry, "values", dict, where, {}).items()
    }
    per_image = {
        key: _numbers(found, f"{where}: {key}")
        for key, found in _get(entry, "per_image", dict, where, {}).items()
    }
    kept = [_kept(step, f"{where}: kept") for step in _get(entry, "kept", list, where, [])]
    return Row(
        name=name,
        label=_get(entry, "label", str, where, name) or name,
        family=_one_of(_get(entry, "family", str, where), FAMILIES, f"{where}: family"),
        default=bool(entry.get("default", False)),
        run=run,
        reason=_get(entry, "reason", str, where, None),
        measured=status == "measured",
        values=values,
        per_image=per_image,
        kept=kept,
    )


def _value(entry: Any, where: str) -> Value:
    kinds: dict[str, Any] = dict.fromkeys(("mean", "low", "high", "p", "std", "cap"), (int, float))
    kinds |= dict.fromkeys(("n", "equal", "subsets", "subset_size", "splits"), int)
    kinds |= dict.fromkeys(("against", "withheld", "warning", "note"), str)
    kinds |= {"difference": dict}
    found = {name: _get(entry, name, kind, where, None) for name, kind in kinds.items()}
    return Value(
        **{name: found[name] for name in found if name in Value.__dataclass_fields__},
        remark=remark(found),
    )


def _kept(entry: Any, where: str) -> Kept:
    step = Kept(
        *(_get(entry, name, (int, float), where) for name in ("step", "level", "tokens", "kept"))
    )
    if not 0 < step.kept <= step.tokens < math.inf:
        raise UserError(
            f"results.json, {where}: expected 0 < kept <= tokens, got {entry!r}; {AGAIN}"
        )
    return step


def _gate(entry: Any, where: str) -> Gate:
    name, expected, got = (
        str(_get(entry, field, str, where)) for field in ("name", "expected", "got")
    )
    passed, withholds = (
        _get(entry, "passed", bool, where),
        _get(entry, "withholds", bool, where, False),
    )
    return Gate(name, expected, got, passed, withholds)


def _numbers(entry: Any, where: str) -> dict[str, float]:
    if not isinstance(entry, dict) or any(
        not _is(number, (int, float)) for number in entry.values()
    ):
        raise UserError(
            f"results.json, {where}: expected one number for each image, got {entry!r}; {AGAIN}"
        )
    return {key: float(number) for key, number in entry.items()}


_NEEDED = object()


def _get(entry: Any, name: str, kind: Any, where: str, default: Any = _NEEDED) -> Any:
    """`entry[name]`, which must be of `kind`; `default`, where one is given, if it is missing or
    null.
    """
    if isinstance(entry, Mapping):
        found = entry.get(name)
        if found is None and default is not _NEEDED:
            return default
        if _is(found, kind):
            return found
    kinds = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
    got = entry.get(name) if isinstance(entry, Mapping) else entry
    raise UserError(f"results.json, {where}: expected {name} ({kinds}), got {got!r}; {AGAIN}")


def _is(value: Any, kind: Any) -> bool:
    """Whether `value` is of `kind`; true and false are no numbers, and NaN is none either."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) and not (isinstance(value, float) and math.isnan(value))


def _one_of(value: str, allowed: Sequence[str], where: str) -> str:
    if value not in allowed:
        raise UserError(
            f"results.json, {where}: expected one of {', '.join(allowed)}, got {value!r}; {AGAIN}"
        )
    return value
