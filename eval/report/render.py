"""Write the report, one page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mame_sd.runs.files import write_atomically

from ..results.schema import Results
from .headline import cards, headline, remarks
from .pictures import gradient, load_pictures
from .plot import plot
from .select import Focus, focus
from .tables import every_table

HTML = "report.html"
PAPER = (
    "MaMe & MaRe: Matrix-Based Token Merging and Restoration for Efficient Visual Perception and"
    " Synthesis"
)

_PAGES = Environment(
    loader=PackageLoader(__package__ or "", "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(results: Results, out: Path) -> Path:
    """Write report.html into `out`, whole or not at all.

    Args:
        results: the results; rows that are missing or not measured are reported as such.
        out: the folder that holds the runs of the rows. The report names images that can't be read.

    Returns:
        The path of report.html.

    Raises:
        UserError: `out` can't be written.
        MachineError: the disk is full, for example.
    """
    chosen = focus(results)
    page = _PAGES.get_template("report.html.j2").render(_context(results, chosen, out))
    # half a surrogate pair is no UTF-8
    write_atomically(out / HTML, page.encode(errors="replace"))
    return out / HTML


def _context(results: Results, chosen: Focus, folder: Path) -> dict[str, Any]:
    """Return everything that the templates show."""
    return {
        "results": results,
        "chosen": chosen,
        "headline": headline(chosen),
        "cards": cards(chosen),
        "remarks": remarks(results, chosen),
        "facts": _facts(results),
        "tables": every_table(results),
        "pictures": load_pictures(results, chosen, folder),
        "gradient": gradient(),
        "plot": plot(results, chosen),
        "failed": results.failed,
        "warning": results.warning,
        "manifest": _flat(results.manifest),
        "command": results.manifest.get("command", ""),
        "paper": PAPER,
        "style": _source("report.css"),
        "script": _source("report.js"),
    }


def _source(name: str) -> Markup:
    assert _PAGES.loader is not None
    return Markup(_PAGES.loader.get_source(_PAGES, name)[0])


_FACTS = {  # entries of the manifest, and how they read next to the headline
    "steps": "{} steps",
    "guidance": "guidance {}",
    "device": "{}",
    "dtype": "{}",
    "threads": "CPU threads: {}",
}


def _facts(results: Results) -> list[str]:
    """Return what the figures depend on, in a few words each."""
    entries = {key: _lookup(results.manifest, key) for key in _FACTS}
    return [
        f"{results.images:,} image{'s' * (results.images != 1)} per row",
        *(_FACTS[key].format(value) for key, value in entries.items() if value is not None),
    ]


def _lookup(manifest: Mapping[str, Any], key: str) -> Any:
    """Return the first value named `key` at any depth, outermost first, or None."""
    if key in manifest and not isinstance(manifest[key], Mapping):
        return manifest[key]
    inner = (_lookup(value, key) for value in manifest.values() if isinstance(value, Mapping))
    return next((value for value in inner if value is not None), None)


def _flat(manifest: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return (dotted name, value) of every leaf, in the manifest's order."""
    leaves = []
    for key, value in manifest.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            leaves += _flat(value, f"{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            leaves.append((name, text))
    return leaves
