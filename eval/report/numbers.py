"""Format numbers: fixed digits, a true minus sign, no false zero."""

from __future__ import annotations

import math

from ..results.schema import Value


def number(value: float, digits: int) -> str:
    """Format a value with `digits` after the point.

    Infinity is ``∞``, and what would read as 0.000 is ``<0.001``.
    """
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{abs(value):.{digits}f}"
    if value != 0 and float(text) == 0:
        return f"{'<' if value > 0 else '>−'}{10.0**-digits:.{digits}f}"
    return f"−{text}" if value < 0 else text


def interval(value: Value, digits: int) -> str:
    """Format the interval as ``low – high``, or the spread as ``± std``, or return "".

    The baseline's times as fast as itself have no interval worth showing.
    """
    if value.interval == (value.mean, value.mean):
        return ""
    if value.interval is None:
        return f"± {number(value.std, digits)}" if value.std else ""
    return " – ".join(number(end, digits) for end in value.interval)


def p_value(value: Value) -> str:
    """Format the p-value as ``p 0.03`` or ``p < 0.001``, or return "" if there is none."""
    if value.p is None:
        return ""
    return "p < 0.001" if value.p < 0.001 else f"p {value.p:.{3 if value.p < 0.1 else 2}f}"
