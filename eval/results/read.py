"""The content of results.json as values that the rest can trust: checked once, here."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from mame_sd.errors import UserError

from .schema import BLOCKS, FAMILIES, KINDS, Column, Gate, Picture, Results, Row, Value

AGAIN = "run the benchmark again"
T = TypeVar("T")


def parse(results: Mapping[str, Any]) -> Results:
    """`results`, the content of results.json, checked.

    Raises:
        UserError: naming the entry that is missing or of another kind.
    """
    top = "the top level"
    reference = _get(results, "reference", dict, top, {})
    parsed = _read(
        Results,
        results,
        top,
        metrics=[
            _read(Column, entry, f"metrics[{key!r}]", key=key)
            for key, entry in _get(results, "metrics", dict, top).items()
        ],
        rows=[
            _row(entry, f"rows[{n}]") for n, entry in enumerate(_get(results, "rows", list, top))
        ],
        pictures=[
            _read(Picture, entry, f"images[{key!r}]", key=key)
            for key, entry in _get(results, "images", dict, top, {}).items()
        ],
        gates=[
            _read(Gate, entry, f"gates[{n}]")
            for n, entry in enumerate(_get(results, "gates", list, top, []))
        ],
        reference=_get(reference, "name", str, "reference", None),
        reference_n=_get(reference, "n", int, "reference", None),
        notes=[str(note) for note in _get(results, "notes", list, top, [])],
    )
    _one_of(parsed.kind, KINDS, "kind")
    for column in parsed.metrics:
        where = f"metrics[{column.key!r}]"
        _one_of(column.better, ("lower", "higher"), f"{where}.better")
        _one_of(column.block, BLOCKS, f"{where}.block")
    return parsed


def _row(entry: Any, where: str) -> Row:
    name = _get(entry, "name", str, where)
    where = f"row {name!r}"
    status = _get(entry, "status", str, where)
    _one_of(status, ("measured", "not measured"), f"{where}: status")
    values = {
        key: _read(Value, value, f"{where}: {key}")
        for key, value in _get(entry, "values", dict, where, {}).items()
    }
    per_image = {
        key: _numbers(found, f"{where}: {key}")
        for key, found in _get(entry, "per_image", dict, where, {}).items()
    }
    row = _read(
        Row, entry, where, measured=status == "measured", values=values, per_image=per_image
    )
    _one_of(row.family, FAMILIES, f"{where}: family")
    run = row.run
    if run is not None and (PurePosixPath(run).is_absolute() or ".." in Path(run).parts):
        raise UserError(
            f"results.json, {where}: expected run to be a folder inside, got {run!r}; {AGAIN}"
        )
    return row


def _read(kind: type[T], entry: Any, where: str, **given: Any) -> T:
    """The dataclass `kind` of an entry, whose fields must be of the types that it names; `given`
    are fields that were read before.
    """
    hints = typing.get_type_hints(kind)
    found = dict(given)
    for one in fields(kind):  # type: ignore[arg-type]
        if one.name not in found:
            lacking = one.default is MISSING and one.default_factory is MISSING
            value = _get(
                entry, one.name, _kinds(hints[one.name]), where, *([] if lacking else [None])
            )
            if lacking or value is not None:
                found[one.name] = value
    return kind(**found)


def _kinds(hint: Any) -> Any:
    """What isinstance takes for a type, None left out; a float may be a whole number."""
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds: list[Any] = []
    for part in parts:
        origin = typing.get_origin(part) or part
        if origin is not types.NoneType:
            named = {float: (int, float), Mapping: (dict,), Sequence: (list,)}
            kinds += named.get(origin, (origin,))
    return kinds[0] if len(kinds) == 1 else tuple(kinds)


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


def _one_of(value: str, allowed: Sequence[str], where: str) -> None:
    if value not in allowed:
        raise UserError(
            f"results.json, {where}: expected one of {', '.join(allowed)}, got {value!r}; {AGAIN}"
        )
