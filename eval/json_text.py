"""JSON that every parser reads: infinity (PSNR of equal images) is the number 1e999, NaN is
refused.
"""

from __future__ import annotations

import json
import math
import secrets
from typing import Any


def json_text(value: Any, indent: int | None = None) -> str:
    """`value` as JSON text.

    >>> json_text({"psnr": math.inf}), json.loads(json_text([-math.inf]))
    ('{"psnr": 1e999}', [-inf])

    Raises:
        ValueError: NaN, which no measurement may be.
    """
    mark = f"infinity-{secrets.token_hex(8)}"  # no prompt holds it
    text = json.dumps(_marked(value, mark), indent=indent, allow_nan=False)
    return text.replace(f'"-{mark}"', "-1e999").replace(f'"{mark}"', "1e999")


def _marked(value: Any, mark: str) -> Any:
    if isinstance(value, dict):
        return {key: _marked(item, mark) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(item, mark) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return mark if value > 0 else f"-{mark}"
    return value
