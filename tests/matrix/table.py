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


KERNELS = {"PyTorch's": "PyTorch", "all but sage, flash (no mask)": "no Sage, Flash"}


def features_table() -> Iterator[str]:
    """What goes with merging on Stable Diffusion, and what becomes of the one-liner there."""
    yield "| feature | `set_attn_processor` |"
    yield "|---|---|"
    for row in features.ROWS:
        yield f"| {row.name} | {row.one_liner or row.processor} |"


def restores(recorded: str) -> str:
    """Say in which modules tokens are restored: all, none or some, and why not in the others.

    Args:
        recorded: what the sweep found, such as "2 of 3: a skip connection".
    """
    count, _, reason = recorded.partition(": ")
    if reason:
        return f"{'no' if count == 'none' else 'some'}: {reason}"
    return "yes"


def denoisers() -> Iterator[str]:
    """What merges and is restored in each family, as the sweep recorded it of every class of
    diffusers, and what is refused for which reason.
    """
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, found in sorted(record.items(), key=lambda one: (one[1]["family"].lower(), one[0])):
        cells = restores(found["mlp"]), restores(found["block"])
        kernels = KERNELS.get(found["kernels"], found["kernels"])
        rows.setdefault((found["family"], *cells, kernels), []).append(name)
    yield "| family | classes | MLPs | blocks | kernels |"
    yield "|---|---|---|---|---|"
    for (family, mlps, blocks, kernels), names in rows.items():
        first = family or "UNets, DiT, PixArt"
        yield f"| {first} | {', '.join(names)} | {mlps} | {blocks} | {kernels} |"
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
    """The page with its tables as they are now: each stands between its mark and the next end."""
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
