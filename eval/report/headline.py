"""The report in one sentence, and the second one that compares with ToMeSD.

Plain words, also for bad news.
"""

from __future__ import annotations

from ..results.schema import MethodResult, Results, Value
from .frontier import points
from .numbers import number
from .select import PUBLISHED, Focus


def headline(chosen: Focus) -> str:
    """How fast the headline's row is, and how close to the baseline."""
    if chosen.mame is None:
        return "No run with MaMe has been measured yet."
    closeness, speed = _closeness(chosen, chosen.mame), _speed(chosen, chosen.mame)
    if not speed:
        closeness = closeness or "neither was its distance from the baseline"
        return f"{chosen.mame.label}: speed was not measured; {closeness}."
    end = f", {closeness}." if closeness else "; how close it stays was not measured."
    return f"{chosen.mame.label} {speed}{end}"


def comparison(results: Results, chosen: Focus) -> str:
    """ToMeSD, ToMe or another rival at the nearest speed, or why it is missing. Also who is both
    faster and closer; empty where there is nothing to say.
    """
    said = ""
    if chosen.rival is None:
        row = next((row for row in results.rows if row.family in PUBLISHED), None)
        if row is not None:
            reason = row.reason or "no reason given"
            said = f"{PUBLISHED[row.family]} was not measured: {reason}."
    else:
        speed, closeness = _speed(chosen, chosen.rival), _closeness(chosen, chosen.rival)
        if speed and closeness:
            label = chosen.rival.label
            said = f"{label[0].upper()}{label[1:]} {speed}, {closeness}."
    return f"{said} {_surpassed(results, chosen)}".strip()


def _surpassed(results: Results, chosen: Focus) -> str:
    """The rows of others that are both faster and closer than the headline's, by intervals that lie
    apart; empty where there are none.
    """
    found = points(results, chosen)
    ours = next((point for point in found if point.row is chosen.mame), None)
    if ours is None or chosen.closeness is None or ours.near.equal:
        return ""
    lower = chosen.closeness.better == "lower"

    def surpasses(speed: Value, near: Value) -> bool:
        closer = _above(near, ours.near) if not lower else _above(ours.near, near)
        return closer and _above(speed, ours.speed)

    names = [
        point.row.label
        for point in found
        if point.row.family not in ("mame", "baseline")
        and surpasses(point.speed, point.near)
        and not point.near.equal
    ]
    return f"Both faster and closer: {', '.join(names)}." if names else ""


def _above(high: Value, low: Value) -> bool:
    """Whether the interval of `high` lies above that of `low`: a single round or prompt has none,
    and tells nothing.
    """
    if high.interval is None or low.interval is None:
        return False
    return high.interval[0] > low.interval[1]


def _closeness(chosen: Focus, row: MethodResult) -> str:
    value, metric = row.value(chosen.closeness), chosen.closeness
    if metric is None or value is None or value.mean is None:
        return ""
    label = metric.label.split(" (")[0]
    if label.istitle():
        label = label.lower()
    text = number(value.mean, metric.digits)
    text = f"below {text[1:]}" if text.startswith("<") else f"of {text}"
    article = "an" if label[0] in "AEFHILMNORSXa" else "a"
    return f"at {article} {label} {text} {metric.unit}".rstrip()


def _speed(chosen: Focus, row: MethodResult) -> str:
    """How fast a row is; empty where that was not measured."""
    speed = row.value(chosen.speed)
    if speed is None or speed.mean is None:
        return ""
    by = " by CPU time" if chosen.latency is not None and chosen.latency.name == "cpu" else ""
    between = " to ".join(number(end, 2) for end in speed.interval or ())
    as_fast = f"{number(speed.mean, 2)} times as fast"
    apart = f"{as_fast}, {between}" if between else as_fast
    low, high = speed.interval or (1.0, 1.0)  # a single round tells nothing
    if low <= 1 <= high:
        return f"is not measurably faster or slower than the baseline{by} ({apart})"
    if speed.mean < 1:
        return f"is slower than the baseline{by} ({apart})"
    return f"is {as_fast} as the baseline{by}" + (f" ({between})" if between else "")
