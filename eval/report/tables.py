"""Prepare the tables as rows of cells: which cell is best, which is withheld and why.

Speed with fidelity to the baseline (paired, image by image), quality against the named reference
set, and other costs are tables of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..results.schema import Column, MethodResult, Results
from .numbers import interval, number, p_value

NOT_MEASURED = "not measured"
SHORT = 32  # characters of a reason that a cell holds


@dataclass
class Cell:
    """One cell.

    Attributes:
        kind: "value", "withheld", "self" (the baseline against itself) or "absent".
        against: name of the row that p compares with.
        note: why a value is missing, or how many equal images it excludes.
        footnote: what is too long for a cell.
        best: True if it is the best of its column.
        partial: True if it excludes equal images.
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
    """One row of a table; `cells` is empty if the row wasn't measured."""

    row: MethodResult
    cells: Sequence[Cell] = ()


@dataclass(frozen=True)
class Table:
    """A table; `groups` are (title, metrics) in column order, which a line's cells follow."""

    name: str
    title: str
    groups: Sequence[tuple[str, Sequence[Column]]]
    lines: Sequence[Line]

    @property
    def metrics(self) -> list[Column]:
        """Return the metrics in column order."""
        return [metric for _, group in self.groups for metric in group]

    @property
    def against(self) -> list[str]:
        """Return the labels of the rows that the p-values compare with."""
        names = {
            cell.against for line in self.lines for cell in line.cells if cell.p and cell.against
        }
        return [line.row.label for line in self.lines if line.row.name in names]

    @property
    def footnotes(self) -> list[str]:
        """Return ``columns: why values are missing, or what to know about them``, each once."""
        columns: dict[str, dict[str, None]] = {}  # labels by note, each once
        for line in self.lines:
            for metric, cell in zip(self.metrics, line.cells, strict=False):
                if cell.footnote:
                    columns.setdefault(cell.footnote, {})[metric.label] = None
        return [f"{', '.join(labels)}: {note}" for note, labels in columns.items()]


def every_table(results: Results) -> list[Table]:
    """Return three tables.

    The first has speed and then fidelity to the baseline, the second quality against the reference
    set that its title names, the third seconds and memory.
    """
    names = ("flops", "speedup")
    costs = results.block("cost")
    speed = [metric for metric in costs if metric.name in names]
    rest = [metric for metric in costs if metric not in speed]
    quality = (
        f"Quality against {results.reference}"
        if results.reference
        else "Quality (no reference set was given)"
    )
    fidelity = [("Speed", speed), ("Fidelity to the baseline", results.block("fidelity"))]
    made = (
        ("fidelity", "Speed, and fidelity to the baseline", fidelity),
        ("quality", quality, [(quality, results.block("quality"))]),
        ("cost", "Other costs", [("Other costs", rest)]),
    )
    return [_table(name, title, groups, results) for name, title, groups in made]


def _table(
    name: str,
    title: str,
    groups: Sequence[tuple[str, Sequence[Column]]],
    results: Results,
) -> Table:
    filled = [(head, metrics) for head, metrics in groups if metrics]
    columns = [metric for _, metrics in filled for metric in metrics]
    lines = [
        Line(row, [_cell(row, m) for m in columns] if row.measured else ()) for row in results.rows
    ]
    for index, metric in enumerate(columns):
        _mark_best(metric, index, [line for line in lines if line.cells])
    return Table(name, title, filled, lines)


def _cell(row: MethodResult, metric: Column) -> Cell:
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
    """Return a cell that is withheld, or not measured if `reason` says so."""
    measured = not reason.startswith(NOT_MEASURED)
    reason = reason.removeprefix(NOT_MEASURED).removeprefix(": ")
    note, footnote = (reason, "") if len(reason) <= SHORT else ("", reason)
    kind, text = ("withheld", "withheld") if measured else ("absent", NOT_MEASURED)
    return Cell(kind, text, note=note, footnote=footnote)


def _mark_best(metric: Column, index: int, lines: Sequence[Line]) -> None:
    """Mark the cells of a column that read as the best of at least two.

    None is marked if a mean excludes equal images, which would have made it better. The floor is
    never marked.
    """
    cells = [line.cells[index] for line in lines]
    scored = [
        (cell.mean, cell)
        for line, cell in zip(lines, cells, strict=True)
        if cell.mean is not None and line.row.family != "floor"
    ]
    if len({cell.text for _, cell in scored}) < 2 or any(cell.partial for cell in cells):
        return
    _, best = (min if metric.better == "lower" else max)(scored, key=lambda one: one[0])
    for _, cell in scored:
        cell.best = cell.text == best.text
