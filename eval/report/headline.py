"""Write the report's headline, and compare with the nearest and the fastest rival."""

from __future__ import annotations

from dataclasses import dataclass

from ..results.schema import Column, MethodResult, Results, Value
from .numbers import number
from .plot import points
from .select import Focus, focus


@dataclass(frozen=True)
class Card:
    """One row in large type.

    Attributes:
        role: why it is shown, such as "nearest rival".
        speed: how many times as fast as the baseline it is.
        between: the interval of the speed, or "".
        seconds: its seconds and the baseline's, or another latency, or "".
        near: its closeness to the baseline.
        about: name of that metric, and which values are closer.
    """

    role: str
    row: MethodResult
    speed: str
    between: str
    seconds: str
    near: str
    about: str


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
    """Say how fast and how close the nearest and the fastest rival are, and add the remarks."""
    said = [_about(f"The {role}", chosen, row) for role, row in _rivals(chosen)]
    return " ".join(filter(None, [*said, remarks(results, chosen)]))


def remarks(results: Results, chosen: Focus) -> str:
    """Say why ToMeSD is missing, and which rows are both faster and closer than ours."""
    peers, said = [row for row in results.rows if row.family == "tomesd"], []
    if peers and not any(row.measured for row in peers):
        said.append(f"ToMeSD was not measured: {peers[0].reason or 'no reason given'}.")
    return " ".join(filter(None, [*said, _surpassed(results, chosen)]))


def cards(chosen: Focus) -> list[Card]:
    """Return the headline's row and its rivals in large type; none without speed and closeness."""
    shown = []
    for role, row in [("merged", chosen.mame), *_rivals(chosen)]:
        speed, near = (
            None if row is None else row.value(metric)
            for metric in (chosen.speed, chosen.closeness)
        )
        if row is None or chosen.closeness is None or speed is None or near is None:
            continue
        assert speed.mean is not None
        assert near.mean is not None
        closer = "lower" if chosen.closeness.better == "lower" else "higher"
        label = " ".join(filter(None, (_short(chosen.closeness), chosen.closeness.unit)))
        shown.append(
            Card(
                role,
                row,
                number(speed.mean, 2),
                " to ".join(number(end, 2) for end in speed.interval or ()),
                _seconds(chosen, row),
                number(near.mean, chosen.closeness.digits),
                f"{label}, {closer} is closer to the baseline",
            )
        )
    return shown


def _rivals(chosen: Focus) -> list[tuple[str, MethodResult | None]]:
    """Return the nearest and the fastest rival with their roles; one row may be both."""
    if chosen.rival is not None and chosen.rival is chosen.fastest:
        return [("nearest and fastest rival", chosen.rival)]
    return [("nearest rival", chosen.rival), ("fastest rival", chosen.fastest)]


def _seconds(chosen: Focus, row: MethodResult) -> str:
    """Return the row's latency next to the baseline's, or "" if one of them wasn't measured."""
    metric = chosen.latency
    base = None if chosen.baseline is None else chosen.baseline.value(metric)
    own = row.value(metric)
    if metric is None or base is None or own is None:
        return ""
    one, other = (number(value.mean or 0.0, metric.digits) for value in (own, base))
    of = " of CPU time" if metric.name == "cpu" else ""
    return f"{one} instead of {other} {metric.unit}{of}"


def _short(metric: Column) -> str:
    """Return a metric's label without what is in brackets."""
    return metric.label.split(" (")[0]


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
    label = _short(metric)
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
    low, high = speed.interval or (1.0, 1.0)  # a single round proves nothing
    if low <= 1 <= high:
        return f"is not measurably faster or slower than the baseline{by} ({apart})"
    if speed.mean < 1:
        return f"is slower than the baseline{by} ({apart})"
    return f"is {as_fast} as the baseline{by}" + (f" ({between})" if between else "")
