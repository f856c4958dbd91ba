"""Read JSON that people write, and write JSON that every parser reads.

A file holds one object, in which no name occurs twice. Infinity is written as the number 1e999, and
NaN is refused.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def _once_each(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the name {name!r} stands in one object twice")
        values[name] = value
    return values


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Read the object in a .json file. `what` describes its content in errors.

    Raises:
        ValueError: the file can't be read or holds something else. The message names the file.
    """
    expected = f"{path}: expected a .json file of {what}"
    if path.suffix.lower() != ".json":
        raise ValueError(f"{expected}, got {path.suffix or 'no ending'}; rename or convert it")
    try:
        text = path.read_text(encoding="utf-8-sig")
        values = json.loads(text, object_pairs_hook=_once_each)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"{expected}, but it can't be read ({reason}); check the path") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{expected}, but {error}; correct it") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected an object of {what}, got {str(values)[:60]}")
    return values


def json_text(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON text.

    >>> json_text({"psnr": math.inf}), json.loads(json_text([-math.inf]))
    ('{"psnr": 1e999}', [-inf])

    Raises:
        ValueError: a number is NaN.
    """
    mark = f"infinity-{secrets.token_hex(8)}"  # random, so that no prompt contains it
    text = json.dumps(_marked(value, mark), indent=indent, allow_nan=False)
    return text.replace(f'"-{mark}"', "-1e999").replace(f'"{mark}"', "1e999")


def _marked(value: Any, mark: str) -> Any:
    if isinstance(value, dict):
        return {key: _marked(item, mark) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(item, mark) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float) and math.isinf(value):
        return mark if value > 0 else f"-{mark}"
    return value
