"""Read results.json as checked values."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn

from mame_sd.errors import UserError

from .schema import Results


def parse(results: Mapping[str, Any]) -> Results:
    """Check the content of results.json by the types of the schema.

    Raises:
        UserError: an entry is missing or of another type; the message names it.
    """
    checked: Results = _read(Results, results, "")
    return checked


def _read(kind: Any, value: Any, where: str) -> Any:
    """Read a value as a `kind`: a dataclass, a list or mapping of such, or a plain value."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or (value is None and NoneType in inner):
        return value
    if origin is UnionType:
        return _read(inner[0], value, where)
    if origin is Literal:
        return value if value in inner else _refuse(f"one of {', '.join(inner)}", value, where)
    if is_dataclass(kind):
        return _dataclass(kind, value, where)
    if isinstance(value, list) and origin is not None and not issubclass(origin, Mapping):
        return [_read(inner[0], item, f"{where}[{n}]") for n, item in enumerate(value)]
    if isinstance(value, dict) and origin is not None and issubclass(origin, Mapping):
        return {key: _read(inner[1], item, f"{where}[{key!r}]") for key, item in value.items()}
    # true and false are no numbers, and NaN is none either
    kinds = (int, float) if kind is float else (origin or kind,)
    if type(value) in kinds and not (isinstance(value, float) and math.isnan(value)):
        return value
    return _refuse(" or ".join(one.__name__ for one in kinds), value, where)


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        _refuse(f"a {kind.__name__.lower()}", value, where)
    hints, values = typing.get_type_hints(kind), {}
    for one in fields(kind):
        place = f"{where}.{one.name}".lstrip(".")
        if one.name in value:
            values[one.name] = _read(hints[one.name], value[one.name], place)
        elif one.default is MISSING and one.default_factory is MISSING:
            _refuse("an entry", None, place)
    return kind(**values)


def _refuse(expected: str, got: Any, where: str) -> NoReturn:
    raise UserError(
        f"results.json, {where or 'the top level'}: expected {expected}, got {got!r:.80}; delete"
        " results.json and run the benchmark again"
    )
