"""The content of results.json as values that the rest can trust: checked once, here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from mame_sd.errors import UserError

from .schema import BLOCKS, FAMILIES, KINDS, Column, Gate, Kept, Picture, Results, Row, Value

AGAIN = "run the benchmark again"


def parse(results: Mapping[str, Any]) -> Results:
    """`results`, the content of results.json, checked.

    Raises:
        UserError: naming the entry that is missing or of another kind.
    """
    top = "the top level"
    reference = _get(results, "reference", dict, top, {})
    return Results(
        suite=_get(results, "suite", str, top),
        created=_get(results, "created", str, top, ""),
        manifest=_get(results, "manifest", dict, top),
        metrics=[_column(key, entry) for key, entry in _get(results, "metrics", dict, top).items()],
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
        kind=_one_of(_get(results, "kind", str, top, "generation"), KINDS, "kind"),
        sensitivity=_get(results, "sensitivity", str, top, ""),
    )


def _picture(key: str, entry: Any) -> Picture:
    where = f"images[{key!r}]"
    return Picture(key, _get(entry, "prompt", str, where), _get(entry, "seed", int, where, None))


def _column(key: str, entry: Any) -> Column:
    where = f"metrics[{key!r}]"
    better = _one_of(_get(entry, "better", str, where), ("lower", "higher"), f"{where}.better")
    block = _one_of(_get(entry, "block", str, where), BLOCKS, f"{where}.block")
    return Column(
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
    per_image: dict[str, Mapping[str, float]] = {
        key: _numbers(found, f"{where}: {key}")
        for key, found in _get(entry, "per_image", dict, where, {}).items()
    }
    kept = [_kept(step, f"{where}: kept") for step in _get(entry, "kept", list, where, [])]
    return Row(
        name=name,
        label=_get(entry, "label", str, where, name) or name,
        family=_one_of(_get(entry, "family", str, where), FAMILIES, f"{where}: family"),
        default=bool(entry.get("default", False)),
        config=_get(entry, "config", dict, where, {}),
        run=run,
        reason=_get(entry, "reason", str, where, None),
        measured=status == "measured",
        values=values,
        per_image=per_image,
        kept=kept,
        solved=_get(entry, "solved", dict, where, None),
    )


def _value(entry: Any, where: str) -> Value:
    kinds: dict[str, Any] = dict.fromkeys(("mean", "low", "high", "p", "std", "cap"), (int, float))
    kinds |= dict.fromkeys(("n", "equal", "subsets", "subset_size", "splits"), int)
    kinds |= dict.fromkeys(("against", "withheld", "statistic", "warning", "note"), str)
    kinds |= {"difference": dict, "seeds": list}
    found = {name: _get(entry, name, kind, where, None) for name, kind in kinds.items()}
    return Value(**found)


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
