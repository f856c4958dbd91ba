"""The table of the paper in LaTeX, with intervals, the best values bold, and the two blocks kept
apart.
"""

from __future__ import annotations

from ..results.schema import Column, Results, Row
from .select import Focus
from .tables import SPEEDUP, Cell, Table, fidelity_table, quality_table
from .words import words_of

_SPECIAL = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "−": "$-$",
    "–": "--",
    "∞": r"$\infty$",
    "×": r"$\times$",
    "τ": r"$\tau$",
    "≥": r"$\ge$",
    "≤": r"$\le$",
    "±": r"$\pm$",
}
_ARROWS = {"lower": r"$\downarrow$", "higher": r"$\uparrow$"}


def render(results: Results, chosen: Focus) -> str:
    """A `table*` for booktabs, xcolor and graphicx: speed, fidelity to the baseline, quality
    against the reference.

    Intervals stand in a second line. What is withheld or not measured is a dash, or a column left
    out, explained under the table. Rows with MaMe are shaded as in the paper, and of the costs only
    speed and FLOPs are shown, as there.
    """
    whole = [fidelity_table(results, chosen), quality_table(results, chosen)]
    shown = {"flops", SPEEDUP.key, chosen.latency.key if chosen.latency else ""}
    left_out = {metric.key for metric in results.block("cost")} - shown
    tables = [table.columns(table.used - left_out) for table in whole]
    groups = [group for table in tables for group in table.groups]
    metrics = [metric for _, group in groups for metric in group]
    body = [
        _line(row, [cell for table in tables for cell in _cells(table, n)])
        for n, row in enumerate(results.rows)
    ]
    lines = [
        "% needs \\usepackage{booktabs,graphicx} and \\usepackage[table]{xcolor}",
        r"\begin{table*}[t]",
        r"\centering\footnotesize",
        rf"\caption{{{escape(_caption(results))}}}",
        r"\label{tab:mame-sd}",
        r"\renewcommand\arraystretch{1.2}",
        r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{@{{}}l{'c' * len(metrics)}@{{}}}}",
        r"\toprule",
        "".join(
            rf" & \multicolumn{{{len(group)}}}{{c}}{{{escape(title)}}}" for title, group in groups
        )
        + r" \\",
        " ".join(_rules([len(group) for _, group in groups])),
        "".join(f" & {_head(metric)}" for metric in metrics) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}}",
        *(rf"\par\smallskip {escape(note)}" for note in _notes(results, whole)),
        r"\end{table*}",
    ]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """`text` for LaTeX: special characters escaped, line breaks as spaces."""
    return "".join(_SPECIAL.get(char, char) for char in " ".join(text.split()))


def _cells(table: Table, number: int) -> list[Cell]:
    line = table.lines[number]
    return list(line.cells) or [Cell("absent", "") for _ in table.metrics]


def _line(row: Row, cells: list[Cell]) -> str:
    """The row, and under it its intervals and counts of equal images, if it has any."""
    shade = "\\rowcolor[gray]{0.9}\n" if row.family == "mame" else ""
    lines = [" & ".join([escape(row.label), *(_cell(cell) for cell in cells)]) + r" \\"]
    under = [
        ", ".join(filter(None, (cell.interval, cell.note))) if cell.kind == "value" else ""
        for cell in cells
    ]
    if any(under):
        below = (rf"{{\scriptsize {escape(text)}}}" if text else "" for text in under)
        lines = [lines[0] + "[-3pt]", " & ".join(["", *below]) + r" \\"]
    return "\n".join(shade + line for line in lines)


def _cell(cell: Cell) -> str:
    if cell.kind != "value":
        return "--"
    return rf"\textbf{{{escape(cell.text)}}}" if cell.best else escape(cell.text)


def _head(metric: Column) -> str:
    unit = f" ({escape(metric.unit)})" if metric.unit else ""
    return f"{escape(metric.label)}{unit} {_ARROWS[metric.better]}"


def _rules(widths: list[int]) -> list[str]:
    rules, start = [], 2
    for width in widths:
        rules.append(rf"\cmidrule(l){{{start}-{start + width - 1}}}")
        start += width
    return rules


def _caption(results: Results) -> str:
    reference = f" Quality is against {results.reference}." if results.reference else ""
    return (
        f"Suite {results.suite}, {results.images} images per row."
        f" {words_of(results).fidelity_short}{reference} Below a value: its interval; bold: best."
    )


def _notes(results: Results, tables: list[Table]) -> list[str]:
    """Why cells hold a dash, and what to know of the values: each once."""
    missing = [
        f"{row.label}: not measured ({row.reason or 'no reason given'})."
        for row in results.rows
        if not row.measured
    ]
    withheld = (
        f"{metric.label}: {cell.text} ({cell.note or cell.footnote})."
        for table in tables
        for line in table.lines
        for metric, cell in zip(table.metrics, line.cells, strict=False)
        if cell.kind in ("withheld", "absent") and (cell.note or cell.footnote)
    )
    remarks = (
        f"{metric.label}: {cell.footnote}."
        for table in tables
        for line in table.lines
        for metric, cell in zip(table.metrics, line.cells, strict=False)
        if cell.kind == "value" and cell.footnote
    )
    return missing + list(dict.fromkeys([*withheld, *remarks]))
