"""The report in Markdown: what a pull request or a README can show."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..results.schema import Results, Row
from .pictures import Case
from .select import Focus
from .tables import Cell, Table


def render(page: Mapping[str, Any]) -> str:
    """The Markdown of what `eval.report.render` shows; images are links to the runs' PNG files."""
    results: Results = page["results"]
    parts = [
        f"# {escape(page['headline'])}",
        escape(page["comparison"]),
        escape(" · ".join(page["facts"])),
    ]
    if page["failed"]:
        names = "; ".join(gate.name for gate in page["failed"])
        parts.append(
            f"**{len(page['failed'])} of {len(results.gates)} sanity gates failed:"
            f" {escape(names)}.**"
        )
    parts += [f"**{escape(warning)}**" for warning in page["warnings"]]
    for table in page["tables"]:
        if table.name == "cost" and not table.groups:
            continue
        parts += [
            f"## {escape(table.title)}",
            _table(table) if table.groups else "Not measured in this suite.",
        ]
        parts += [escape(results.sensitivity)] if table.name == "fidelity" else []
        parts += [escape(note) for note in table.footnotes]
    parts.append("Best values are bold; brackets hold intervals.")
    if page["pictures"].cases:
        parts += ["## Pictures", *(_case(case, page["chosen"]) for case in page["pictures"].cases)]
    parts += ["## Sanity gates", _gates(results), *(f"- {escape(note)}" for note in results.notes)]
    manifest = [f"| {escape(name)} | {escape(value)} |" for name, value in page["manifest"]]
    parts += [
        "## Repeat",
        f"```bash\n{page['command']}\n```",
        "\n".join(["| setting | value |", "|---|---|", *manifest]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def escape(text: str) -> str:
    """`text` as literal Markdown in one line, table cells included; HTML in it stays text."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", text)


def _table(table: Table) -> str:
    heads = [f"{m.label}{f' ({m.unit})' if m.unit else ''} {m.arrow}" for m in table.metrics]
    lines = [
        "| | " + " | ".join(escape(head) for head in heads) + " |",
        "|---|" + "---:|" * len(heads),
    ]
    for line in table.lines:
        cells = [_cell(cell) for cell in line.cells] or _not_measured(line.row, len(heads))
        lines.append(f"| {escape(line.row.label)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _not_measured(row: Row, count: int) -> list[str]:
    return [escape(f"not measured: {row.reason or 'no reason given'}"), *[""] * (count - 1)]


def _cell(cell: Cell) -> str:
    if cell.kind in ("withheld", "absent"):
        return escape(f"{cell.text}: {cell.note}" if cell.note else cell.text)
    text = f"**{escape(cell.text)}**" if cell.best else escape(cell.text)
    extra = "; ".join(
        part for part in (cell.interval, cell.p, cell.note if cell.kind == "value" else "") if part
    )
    return f"{text} \\[{escape(extra)}\\]" if extra else text


def _case(case: Case, chosen: Focus) -> str:
    rows: Sequence[Row] = [
        row for row in (chosen.baseline, chosen.rival, chosen.mame) if row is not None and row.run
    ]
    heads = " | ".join(escape(row.label) for row in rows)
    images = " | ".join(
        f"![{escape(row.label)}](<{row.run}/images/{case.picture.key}.png>)" for row in rows
    )
    return (
        f"{case.title}: {escape(case.picture.prompt)}\n\n| {heads} |\n|{'---|' * len(rows)}\n|"
        f" {images} |"
    )


def _gates(results: Results) -> str:
    words = {True: "passed", False: "**failed**"}
    lines = [
        f"- {words[g.passed]}: {escape(g.name)} (expected {escape(g.expected)}; got"
        f" {escape(g.got)})"
        for g in results.gates
    ]
    return "\n".join(lines) or "None were run."
