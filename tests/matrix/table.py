"""The tables of docs/compatibility.md, which `python -m tests.matrix` writes into the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from mame_sd.refused import DIFFUSERS
from tests.matrix import caches, features
from tests.matrix.models.sweep import RECORD, classes

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def features_table() -> Iterator[str]:
    """Yield the table of features of Stable Diffusion, with what becomes of the one-liner."""
    yield "| feature | `set_attn_processor` |"
    yield "|---|---|"
    for row in features.ROWS:
        yield f"| {row.name} | {row.one_liner or row.processor} |"


def restores(recorded: str) -> str:
    """Say where tokens are restored, from what the sweep found ("2 of 3: a skip connection")."""
    count, _, reason = recorded.partition(": ")
    if reason:
        return f"{'no' if count == 'none' else 'some'}: {reason}"
    return "yes"


def denoisers() -> Iterator[str]:
    """Yield what the sweep recorded of each family, and which classes are refused and why."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, found in sorted(record.items(), key=lambda one: (one[1]["family"].lower(), one[0])):
        cells = restores(found["mlp"]), restores(found["block"])
        rows.setdefault((found["family"], *cells), []).append(name)
    yield "| family | classes | MLPs | blocks |"
    yield "|---|---|---|---|"
    for (family, mlps, blocks), names in rows.items():
        yield f"| {family or 'UNets, DiT, PixArt'} | {', '.join(names)} | {mlps} | {blocks} |"
    yield ""
    left = ", ".join(name for name, found in sorted(record.items()) if not found["tau"])
    yield from wrap(f"`tau` merges nothing in {left}.", 100, break_on_hyphens=False)
    yield from ("", "These are refused:", "")
    refused: dict[str, list[str]] = {}
    for name, reason in sorted(DIFFUSERS.items()):
        refused.setdefault(reason, []).append(name)
    for reason, names in refused.items():
        text = f"- {reason}: {', '.join(names)}"
        yield from wrap(text, 100, subsequent_indent="  ", break_on_hyphens=False)
    untried = classes() - record.keys() - DIFFUSERS.keys()
    yield ""
    yield (
        f"{len(record) + len(DIFFUSERS)} classes: {len(record)} merge, {len(DIFFUSERS)} are"
        f" refused, {len(untried)} untried."
    )


def page() -> str:
    """Return the page with its tables as they are now, each between its mark and the next end."""
    text = PAGE.read_text(encoding="utf-8")
    tables = {
        "features": features_table(),
        "denoisers": denoisers(),
        "caches": caches.table(),
    }
    for name, lines in tables.items():
        start = text.index(f"<!-- {name} -->")
        end = text.index("<!-- end -->", start)
        text = "\n".join([text[:start] + f"<!-- {name} -->", "", *lines, "", text[end:]])
    return text
