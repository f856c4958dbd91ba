"""Write the report's headline, and compare with the nearest and the fastest rival."""

from __future__ import annotations

from ..results.schema import MethodResult, Results, Value
from .frontier import points
from .numbers import number
from .select import PUBLISHED, Focus, focus


def summary(results: Results) -> str:
    """Return headline and comparison on one line."""
    chosen = focus(results)
    return f"{headline(chosen)} {comparison(results, chosen)}".strip()


def headline(chosen: Focus) -> str:
    """Say how fast the headline's row is, and how close to the baseline."""
    if chosen.mame is None:
        return "No run with MaMe has been measured yet."
    closeness, speed = _closeness(chosen, chosen.mame), _speed(chosen, chosen.mame)
    if not speed:
        closeness = closeness or "neither was its distance from the baseline"
        return f"{chosen.mame.label}: speed was not measured; {closeness}."
    end = f", {closeness}." if closeness else "; how close it stays was not measured."
    return f"{chosen.mame.label} {speed}{end}"


def comparison(results: Results, chosen: Focus) -> str:
    """Compare with rivals, or return "" if there is nothing to say.

    It says how fast and how close the nearest and the fastest rival are, why ToMeSD or ToMe is
    missing, and which rows are both faster and closer than ours.
    """
    said = []
    measured = {row.family for row in results.measured}
    for row in results.rows:
        if row.family in PUBLISHED and row.family not in measured:
            reason = row.reason or "no reason given"
            said.append(f"{PUBLISHED[row.family]} was not measured: {reason}.")
            break
    if chosen.rival is not None and chosen.rival is chosen.fastest:
        said.append(_about("The nearest and fastest rival", chosen, chosen.rival))
    else:
        said.append(_about("The nearest rival", chosen, chosen.rival))
        said.append(_about("The fastest rival", chosen, chosen.fastest))
    return " ".join(filter(None, [*said, _surpassed(results, chosen)]))


def _about(who: str, chosen: Focus, row: MethodResult | None) -> str:
    if row is None:
        return ""
    speed, closeness = _speed(chosen, row), _closeness(chosen, row)
    return f"{who}, {row.label}, {speed}, {closeness}." if speed and closeness else ""


def _surpassed(results: Results, chosen: Focus) -> str:
    """Name the rows of others that are both faster and closer than the headline's, or return "".

    Their intervals must not overlap with the headline's.
    """
    plotted = points(results, chosen)
    ours = next((point for point in plotted if point.row is chosen.mame), None)
    if ours is None or chosen.closeness is None or ours.near.equal:
        return ""
    lower = chosen.closeness.better == "lower"

    def surpasses(speed: Value, near: Value) -> bool:
        closer = _above(near, ours.near) if not lower else _above(ours.near, near)
        return closer and _above(speed, ours.speed)

    names = [
        point.row.label
        for point in plotted
        if point.row.family not in ("mame", "baseline")
        and surpasses(point.speed, point.near)
        and not point.near.equal
    ]
    return f"Both faster and closer: {', '.join(names)}." if names else ""


def _above(high: Value, low: Value) -> bool:
    """Return True if the interval of `high` lies above that of `low`.

    A single round or prompt has no interval and proves nothing.
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
    """Say how fast a row is, or return "" if that wasn't measured."""
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
