"""The tables of docs/compatibility.md, which `python -m tests.matrix` writes into the page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap

from mame_sd.diffusion.families.refused import EXCLUDED
from tests.matrix import caches, features, transformers, unets
from tests.matrix.models.sweep import RECORD, classes
from tests.matrix.rows import Row

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def layers(merges: Mapping[str, int] | Mapping[int, int]) -> str:
    """How many layers merge, by their number of tokens."""
    return ", ".join(f"{n} of {tokens}" for tokens, n in merges.items())


def rows_table(first: str, rows: Sequence[Row]) -> Iterator[str]:
    yield f"| {first} | layers | one-liner | note |"
    yield "|---|---|---|---|"
    for row in rows:
        one_liner = row.one_liner or row.processor
        yield f"| {row.name} | {layers(row.merges)} | {one_liner} | {row.note} |"


def denoisers() -> Iterator[str]:
    """What merges and is restored of every class of diffusers, as the sweep recorded it, and what
    is refused for which reason.
    """
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    yield (
        "| class | family | layers that merge | `tau` too | kernels | MLPs restored"
        " | blocks restored |"
    )
    yield "|---|---|---|---|---|---|---|"
    for name, found in sorted(record.items()):
        tau = "yes" if found["tau"] else "no"
        merging = (name, found["family"], layers(found["layers"]), tau, found["kernels"])
        cells = (*merging, found["mlp"], found["block"])
        yield f"| {' | '.join(cells)} |"
    yield from ("", "These are refused:", "")
    refused: dict[str, list[str]] = {}
    for name, reason in sorted(EXCLUDED.items()):
        refused.setdefault(reason, []).append(name)
    for reason, names in refused.items():
        for indent, text in (("", reason), ("  ", ", ".join(names))):
            yield from wrap(
                text,
                100,
                initial_indent=f"{indent}- ",
                subsequent_indent=f"{indent}  ",
                break_on_hyphens=False,
            )
    untried = classes() - record.keys() - EXCLUDED.keys()
    yield ""
    yield (
        f"{len(record) + len(EXCLUDED)} classes: {len(record)} merge, {len(EXCLUDED)} are refused,"
        f" {len(untried)} untried."
    )


def page() -> str:
    """The page with its tables as they are now: each stands between its mark and the next end."""
    text = PAGE.read_text(encoding="utf-8")
    tables = {
        "UNets": rows_table("pipeline", unets.ROWS),
        "features": rows_table("feature", features.ROWS),
        "transformers": rows_table("model", transformers.ROWS),
        "denoisers": denoisers(),
        "caches": caches.table(),
        "caches of one model": caches.own_models(),
    }
    for name, lines in tables.items():
        start = text.index(f"<!-- {name} -->")
        end = text.index("<!-- end -->", start)
        text = "\n".join([text[:start] + f"<!-- {name} -->", "", *lines, "", text[end:]])
    return text
