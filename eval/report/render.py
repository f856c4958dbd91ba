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

HTML, MARKDOWN, CSV = "report.html", "report.md", "table.csv"
PAPER = (
    "MaMe & MaRe: Matrix-Based Token Merging and Restoration for Efficient Visual Perception and"
    " Synthesis"
)

# Sentences by kind of benchmark: under the plot of speed against closeness, what fidelity compares,
# what quality says, by which test the p-values are, what lies beside the page, what the method does
WORDS: dict[str, dict[str, str]] = {
    "generation": {
        "frontier": "Further right is faster, further down is closer to the baseline's images.",
        "fidelity": (
            "Each merged image is compared with the baseline's image of the same prompt, seed and"
            " noise. Fidelity says how little merging changes, not how good an image is."
        ),
        "quality": "How good the images are by themselves",
        "test": "paired sign-flip test",
        "beside": "with every number of every image",
        "action": "merges redundant tokens before self-attention, restores them after it",
    },
    "classification": {
        "frontier": (
            "Further right is faster, further down is closer to the unmerged model's answers."
        ),
        "fidelity": (
            "Each answer is compared with the unmerged model's for the same image. Fidelity says"
            " how little merging changes, not how often an answer is right."
        ),
        "quality": "How often the answers are right",
        "test": "McNemar's exact test",
        "beside": "with every figure, <code>answers/</code> with the answer to every image",
        "action": "merges redundant tokens between attention and MLP",
    },
}


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
        "words": WORDS[results.kind],
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


def _html(page: Mapping[str, Any]) -> str:
    loader = PackageLoader(__package__ or "", "templates")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    style, script = (
        Markup(loader.get_source(environment, name)[0]) for name in ("report.css", "report.js")
    )
    return environment.get_template("report.html.j2").render(page, style=style, script=script)
