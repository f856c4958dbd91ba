"""The report in one sentence, and the second one that compares with ToMeSD.

Plain words, also for bad news.
"""

from __future__ import annotations

from ..results.schema import Results, Row, Value
from .frontier import points, speed_interval
from .numbers import phrase, times
from .select import PUBLISHED, Focus

SIGNIFICANT = 0.05
Interval = tuple[float, float] | None


def headline(chosen: Focus) -> str:
    """How fast the headline's row is, and how close to the baseline."""
    if chosen.mame is None:
        return "No run with MaMe has been measured yet."
    name = chosen.mame.label
    closeness = _closeness(chosen, chosen.mame)
    ratio = chosen.speedup(chosen.mame)
    if ratio is None:
        return (
            f"{name}: speed was not measured;"
            f" {closeness or 'neither was its distance from the baseline'}."
        )
    speed = f"{name} {_speed(chosen, chosen.mame, ratio)}"
    return (
        f"{speed}, {closeness}." if closeness else f"{speed}; how close it stays was not measured."
    )


def comparison(results: Results, chosen: Focus) -> str:
    """ToMeSD, ToMe or another rival at the nearest speed, or why it is missing. Also who is both
    faster and closer; empty where there is nothing to say.
    """
    rows = [row for row in results.rows if row.family in PUBLISHED]
    if chosen.rival is None:
        reason = (
            f"{PUBLISHED[rows[0].family]} was not measured: {rows[0].reason or 'no reason given'}."
            if rows
            else ""
        )
        return " ".join([reason, _surpassed(results, chosen)]).strip()
    ratio = chosen.speedup(chosen.rival)
    closeness = _closeness(chosen, chosen.rival)
    if ratio is None or not closeness:
        return _surpassed(results, chosen)
    label = chosen.rival.label
    rival = f"{label[0].upper()}{label[1:]} {_speed(chosen, chosen.rival, ratio)}, {closeness}."
    return " ".join([rival, _surpassed(results, chosen)]).strip()


def _surpassed(results: Results, chosen: Focus) -> str:
    """The rows of others that are both faster and closer than the headline's, by intervals that lie
    apart; empty where there are none.
    """
    found = points(results, chosen)
    ours = next((point for point in found if point.row is chosen.mame), None)
    if ours is None or chosen.closeness is None:
        return ""
    sign = 1 if chosen.closeness.better == "lower" else -1
    names = [
        point.row.label
        for point in found
        if point.row.family not in ("mame", "baseline")
        and _apart(ours.speed, ours.speed_interval, point.speed, point.speed_interval)
        and _apart(
            -sign * ours.closeness,
            ours.closeness_interval,
            -sign * point.closeness,
            point.closeness_interval,
        )
        and not any((row.value(chosen.closeness) or Value()).equal for row in (ours.row, point.row))
    ]
    return f"Both faster and closer: {', '.join(names)}." if names else ""


def _apart(low: float, below: Interval, high: float, above: Interval) -> bool:
    """Whether `high` is above `low`, and their intervals, where both have one, do not meet."""
    meet = (
        below is not None
        and above is not None
        and max(below[0], above[0]) <= min(below[1], above[1])
    )
    return high > low and not meet


def _closeness(chosen: Focus, row: Row) -> str:
    value = row.value(chosen.closeness)
    if chosen.closeness is None or value is None or value.mean is None:
        return ""
    label = chosen.closeness.label.split(" (")[0]
    if label.istitle():
        label = label.lower()
    return (
        f"at {'an' if label[0] in 'AEFHILMNORSXa' else 'a'} {label}"
        f" {phrase(value.mean, chosen.closeness)}"
    )


def _speed(chosen: Focus, row: Row, ratio: float) -> str:
    by = " by CPU time" if chosen.latency is not None and chosen.latency.name == "cpu" else ""
    between = speed_interval(row.value(chosen.latency), ratio, chosen)
    apart = "" if between is None else f", {times(between[0])} to {times(between[1])}"
    if not _differs(chosen, row):
        return (
            f"is not measurably faster or slower than the baseline{by} ({times(ratio)} times as"
            f" fast{apart})"
        )
    if ratio < 1:
        return f"is slower than the baseline{by} ({times(ratio)} times as fast{apart})"
    return f"is {times(ratio)} times as fast as the baseline{by}" + (
        f" ({apart[2:]})" if apart else ""
    )


def _differs(chosen: Focus, row: Row) -> bool:
    """Whether the row's latency differs from the baseline's. It is told by a paired test of the two
    where there is one, else by intervals that do not overlap.
    """
    one, other = (
        row.value(chosen.latency),
        chosen.baseline.value(chosen.latency) if chosen.baseline else None,
    )
    if one is None or other is None or chosen.baseline is None:
        return False
    if one.p is not None and one.against == chosen.baseline.name:
        return one.p < SIGNIFICANT
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return one.n != 1  # a single round tells nothing
    return one.high < other.low or other.high < one.low
