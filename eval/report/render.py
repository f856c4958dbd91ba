"""Write the report's files: the same headline and tables as HTML, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mame_sd.runs.files import write_atomically

from ..results.schema import Results, Row
from . import frontier, markdown
from .figures import NARROW, WIDE
from .headline import comparison, headline
from .manifest import facts, flat
from .pictures import gradient, load_pictures
from .select import Focus, focus
from .tables import Table, cost_metrics, cost_table, fidelity_table, quality_table
from .words import words_of

HTML, MARKDOWN, CSV = "report.html", "report.md", "table.csv"
PAPER = (
    "MaMe & MaRe: Matrix-Based Token Merging and Restoration for Efficient Visual Perception and"
    " Synthesis"
)


def render(results: Results, out: Path) -> Path:
    """Write report.html, report.md and table.csv into the folder `out`, each whole or not at all.

    Args:
        results: rows may be missing or not measured; the report says so.
        out: the folder that holds the runs which the rows name. An image that can't be read is
            named in the report.

    Returns:
        The path of report.html.

    Raises:
        UserError: `out` can't be written.
        MachineError: the disk is full, and the like.
    """
    chosen = focus(results)
    page = _context(results, chosen, out)
    files = {
        HTML: _html(page),
        MARKDOWN: markdown.render(page),
        CSV: table_csv(results, chosen),
    }
    for name, text in files.items():
        write_atomically(
            out / name, text.encode(errors="replace")
        )  # half a surrogate pair is no UTF-8
    return out / HTML


def table_csv(results: Results, chosen: Focus) -> str:
    """One line for each row; for each metric m the columns m, m_low, m_high, m_n, m_p, m_withheld
    and m_remark.
    """
    metrics = [
        *cost_metrics(results, chosen),
        *results.block("fidelity"),
        *results.block("quality"),
    ]
    parts = ("", "_low", "_high", "_n", "_p", "_withheld", "_remark")
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        [
            "name",
            "label",
            "family",
            "status",
            "reason",
            *(m.name + part for m in metrics for part in parts),
        ]
    )
    for row in results.rows:
        status = "measured" if row.measured else "not measured"
        cells = [cell for metric in metrics for cell in _csv_cells(row, metric.name, chosen)]
        writer.writerow([row.name, row.label, row.family, status, row.reason or "", *cells])
    return buffer.getvalue()


def _csv_cells(row: Row, key: str, chosen: Focus) -> list[Any]:
    value = row.values.get(key)
    if value is None:
        ratio = chosen.speedup(row) if key == "speedup" else None
        return ["" if ratio is None else ratio, *[""] * 6]
    remarks = "; ".join(filter(None, (value.equal_note, value.remark)))
    cells = [
        value.mean if value.known else None,
        value.low,
        value.high,
        value.n,
        value.p,
        value.withheld,
        remarks,
    ]
    return ["" if cell is None else cell for cell in cells]


def _context(results: Results, chosen: Focus, folder: Path) -> dict[str, Any]:
    """All that the templates show."""
    tables: Sequence[Table] = [
        fidelity_table(results, chosen),
        quality_table(results, chosen),
        cost_table(results, chosen),
    ]
    return {
        "results": results,
        "words": words_of(results),
        "chosen": chosen,
        "headline": headline(chosen),
        "comparison": comparison(results, chosen),
        "facts": facts(results),
        "tables": tables,
        "pictures": load_pictures(results, chosen, folder),
        "gradient": gradient(),
        "frontier": [(name, frontier.plot(results, chosen, width)) for name, width in _WIDTHS],
        "failed": results.failed,
        "warnings": results.warnings,
        "manifest": flat(results.manifest),
        "command": results.manifest.get("command", ""),
        "paper": PAPER,
    }


_WIDTHS = (("wide", WIDE), ("narrow", NARROW))


def environment(autoescape: bool) -> Environment:
    """Where the templates are found; `autoescape` for HTML."""
    return Environment(
        loader=PackageLoader(__package__ or "", "templates"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _html(page: Mapping[str, Any]) -> str:
    loader = environment(autoescape=True)
    assert loader.loader is not None
    style, script = (
        Markup(loader.loader.get_source(loader, name)[0]) for name in ("report.css", "report.js")
    )
    return loader.get_template("report.html.j2").render(page, style=style, script=script)
