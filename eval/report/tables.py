"""The tables as rows of cells, for every format: which cell is best, which is withheld and why.

Tables that never mix: speed with fidelity to the baseline (paired, image by image), quality against
the named reference set, and the other costs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..results.schema import Column, Results, Row
from .numbers import interval, number, p_value
from .select import Focus

SPEEDUP = Column(
    name="speedup",
    label="Times as fast",
    better="higher",
    block="cost",
    digits=2,
    about="Speed of the row divided by the baseline's; above 1 is faster.",
)
NOT_MEASURED = "not measured"
SHORT = 32  # characters of a reason that a cell holds


@dataclass(frozen=True)
class Cell:
    """`kind` is "value", "withheld", "self" (the baseline against itself) or "absent".

    `note` says why a value is missing, or how many equal images (`partial`) it leaves out;
    `footnote` what is too long for a cell.
    """

    kind: str
    text: str
    mean: float | None = None
    interval: str = ""
    p: str = ""
    against: str | None = None
    note: str = ""
    footnote: str = ""
    best: bool = False
    partial: bool = False


@dataclass(frozen=True)
class Line:
    """One row of a table; `cells` is empty where the row was not measured."""

    row: Row
    cells: Sequence[Cell] = ()


@dataclass(frozen=True)
class Table:
    """`groups` are (title, metrics) in column order; a line's cells follow the metrics."""

    name: str
    title: str
    groups: Sequence[tuple[str, Sequence[Column]]]
    lines: Sequence[Line]

    @property
    def metrics(self) -> list[Column]:
        return [metric for _, group in self.groups for metric in group]

    @property
    def against(self) -> list[str]:
        """Labels of the rows that the p-values compare with."""
        names = {
            cell.against for line in self.lines for cell in line.cells if cell.p and cell.against
        }
        return [line.row.label for line in self.lines if line.row.name in names]

    @property
    def footnotes(self) -> list[str]:
        """``column: why values are missing, or what to know of them``, each once."""
        found = (
            f"{metric.label}: {cell.footnote}"
            for line in self.lines
            for metric, cell in zip(self.metrics, line.cells, strict=False)
            if cell.footnote
        )
        return list(dict.fromkeys(found))


def fidelity_table(results: Results, chosen: Focus) -> Table:
    """Speed, then fidelity to the baseline: what fits beside one another on a desktop."""
    speed = [metric for metric in cost_metrics(results, chosen) if _is_speed(metric, chosen)]
    groups = [("Speed", speed), ("Fidelity to the baseline", results.block("fidelity"))]
    return _table("fidelity", "Speed, and fidelity to the baseline", groups, results, chosen)


def cost_table(results: Results, chosen: Focus) -> Table:
    """The other costs: parts of the seconds, CPU time, memory."""
    rest = [metric for metric in cost_metrics(results, chosen) if not _is_speed(metric, chosen)]
    return _table("cost", "Other costs", [("Other costs", rest)], results, chosen)


def _is_speed(metric: Column, chosen: Focus) -> bool:
    """Whether the metric is that of speed, or the speed-up made of it."""
    return metric.name in ("flops", SPEEDUP.name, chosen.latency.name if chosen.latency else "")


def quality_table(results: Results, chosen: Focus) -> Table:
    """Quality against the reference set, which its title names."""
    title = (
        f"Quality against {results.reference}"
        if results.reference
        else "Quality (no reference set was given)"
    )
    return _table("quality", title, [(title, results.block("quality"))], results, chosen)


def cost_metrics(results: Results, chosen: Focus) -> list[Column]:
    """The cost metrics, with the speed-up after the latency it is made of."""
    metrics = results.block("cost")
    if (
        chosen.latency is None
        or chosen.baseline is None
        or any(metric.name == SPEEDUP.name for metric in metrics)
    ):
        return metrics
    at = metrics.index(chosen.latency) + 1
    return [*metrics[:at], SPEEDUP, *metrics[at:]]


def _table(
    name: str,
    title: str,
    groups: Sequence[tuple[str, Sequence[Column]]],
    results: Results,
    chosen: Focus,
) -> Table:
    filled = [(head, metrics) for head, metrics in groups if metrics]
    columns = [metric for _, metrics in filled for metric in metrics]
    lines = [
        Line(row, [_cell(row, m, chosen) for m in columns] if row.measured else ())
        for row in results.rows
    ]
    marked = [_mark_best(column, index, lines) for index, column in enumerate(columns)]
    return Table(
        name,
        title,
        filled,
        [
            Line(line.row, [column[n] for column in marked] if line.cells else ())
            for n, line in enumerate(lines)
        ],
    )


def _cell(row: Row, metric: Column, chosen: Focus) -> Cell:
    if metric.name == SPEEDUP.name and metric.name not in row.values:
        ratio = chosen.speedup(row)
        return (
            Cell("absent", NOT_MEASURED)
            if ratio is None
            else Cell("value", number(ratio, metric.digits), ratio)
        )
    if metric.block == "fidelity" and row.family == "baseline":
        return Cell("self", "–", note="the baseline itself")
    value = row.values.get(metric.name)
    if value is not None and value.withheld is not None:
        return _without_value(value.withheld)
    if value is None or not value.known:
        return Cell("absent", NOT_MEASURED)
    assert value.mean is not None
    return Cell(
        "value",
        number(value.mean, metric.digits),
        value.mean,
        interval(value, metric.digits),
        p_value(value),
        value.against,
        note=value.equal_note,
        footnote=value.remark,
        partial=bool(value.equal) and math.isfinite(value.mean),
    )


def _without_value(reason: str) -> Cell:
    """Withheld, or not measured where `reason` says so."""
    measured = not reason.startswith(NOT_MEASURED)
    reason = reason.removeprefix(NOT_MEASURED).removeprefix(": ")
    note, footnote = (reason, "") if len(reason) <= SHORT else ("", reason)
    kind, text = ("withheld", "withheld") if measured else ("absent", NOT_MEASURED)
    return Cell(kind, text, note=note, footnote=footnote)


def _mark_best(metric: Column, index: int, lines: Sequence[Line]) -> list[Cell]:
    """The column's cells, those that read as the best of at least two marked; lines without cells
    give an empty one.

    None is marked where a mean leaves out equal images, which would have made it better, and never
    the floor.
    """
    cells = [line.cells[index] if line.cells else Cell("absent", "") for line in lines]
    scores = {
        n: cell.mean
        for n, cell in enumerate(cells)
        if cell.mean is not None and lines[n].row.family != "floor"
    }
    if len({cells[n].text for n in scores}) < 2 or any(cell.partial for cell in cells):
        return cells
    best = cells[(min if metric.better == "lower" else max)(scores, key=lambda n: scores[n])].text
    return [
        dataclasses.replace(cell, best=n in scores and cell.text == best)
        for n, cell in enumerate(cells)
    ]
