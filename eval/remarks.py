"""What must be said beside a value, wherever it is shown: how it came about, what it leaves out,
how it misleads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def equal_images(value: Mapping[str, Any]) -> str:
    """How many images equal the baseline's and are left out of the mean; empty where none are."""
    if not value.get("equal"):
        return ""
    return f"{value['equal']} of {value['n']} equal" + ", mean of the others" * math.isfinite(
        value["mean"]
    )


def remark(value: Mapping[str, Any]) -> str:
    """Warning, notes, subsets, splits and cap of `value`, as results.json has them; empty where
    there is nothing.
    """
    difference = value.get("difference") or {}
    parts = [value.get("warning"), value.get("note"), difference.get("note")]
    if value.get("subsets") is not None and value.get("subset_size") is not None:
        parts.append(f"{_several(value['subsets'], 'subset')} of {value['subset_size']} images")
    if value.get("splits") is not None:
        parts.append(_several(value["splits"], "split"))
    if value.get("std"):
        parts.append("± is the standard deviation over them")
    if value.get("cap") is not None:
        parts.append(f"at most {value['cap']:g}")
    return "; ".join(dict.fromkeys(part for part in parts if part))


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
