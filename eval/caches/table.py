"""Write the table of `mame-sd-eval cache`.

It has means over passages, and paired differences to the best method that drops keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..stats import mean_interval, paired_difference
from ..tables import interval_cell, markdown_table
from .rows import DEFAULT, PUBLISHED, all_rows

Results = Sequence[Mapping[str, Any]]


def summary(results: Results) -> dict[str, Any]:
    """Return all figures of the table as JSON values."""
    figures: dict[str, Any] = {"texts": [], "ratios": [], "full_nll": None}
    by_share: dict[float, dict[str, list[Mapping[str, Any]]]] = {}
    for row in ("full", *all_rows()):
        for line in results:
            if line["row"] == row:
                by_share.setdefault(line["share"], {}).setdefault(row, []).append(line)
    for share, rows in sorted(by_share.items(), reverse=True):
        if "full" in rows:
            figures["full_nll"] = _mean(rows["full"], "nll")
        else:
            figures["texts"] += [_text(row, share, lines) for row, lines in rows.items()]
            figures["ratios"] += _ratios(rows, share)
    return figures


def _text(row: str, share: float, lines: Results) -> dict[str, Any]:
    kl = _by_case(lines)
    means = {name: _mean(lines, name) for name in ("nll", "kept", "bytes")}
    return {"row": row, "share": share, "kl": mean_interval(kl, {c: c for c in kl}), **means}


def _ratios(lines: Mapping[str, Results], share: float) -> list[dict[str, Any]]:
    """Return the ratio of our KL to the best published method's, and the paired difference."""
    figures, values = [], {row: _by_case(one) for row, one in lines.items()}
    for row, kl in values.items():
        rivals = {r: values[r] for r in PUBLISHED if r in values and values[r].keys() >= kl.keys()}
        if not row.startswith(DEFAULT) or not rivals:
            continue
        best = min(rivals, key=lambda r: sum(rivals[r][c] for c in kl))
        other = {c: rivals[best][c] for c in kl}
        gap = paired_difference(kl, other, {c: c for c in kl})
        ratio = sum(kl.values()) / sum(other.values())
        figures.append(
            {"row": row, "share": share, "best": best, "ratio": ratio, "difference": gap}
        )
    return figures


def _by_case(lines: Results) -> dict[str, float]:
    return {line["case"]: line["kl"] for line in lines}


def _mean(lines: Results, name: str) -> float:
    values = [line[name] for line in lines]
    return math.fsum(values) / len(values)


def format_table(figures: Mapping[str, Any]) -> str:
    """Format the figures as Markdown: KL by row and share, and ratios."""
    tables: list[str] = []
    shares = list(dict.fromkeys(e["share"] for e in figures["texts"]))
    if shares:
        rows: list[list[str]] = []
        if figures["full_nll"] is not None:
            perplexity = f"{math.exp(figures['full_nll']):.2f}"
            rows.append(["full", *("0" for _ in shares), perplexity, "1.00", ""])
        for row in dict.fromkeys(e["row"] for e in figures["texts"]):
            entries_by_share = {e["share"]: e for e in figures["texts"] if e["row"] == row}
            cells = [
                interval_cell(entries_by_share[s]["kl"]) if s in entries_by_share else ""
                for s in shares
            ]
            loss = " ".join(f"{math.exp(e['nll']):.2f}" for e in entries_by_share.values())
            size = " ".join(f"{e['bytes']:.2f}" for e in entries_by_share.values())
            rows.append(
                [row, *cells, loss, size, str(entries_by_share[min(entries_by_share)]["kl"]["n"])]
            )
        heads = ["method", *(f"KL at {s:g}" for s in shares), "perplexity", "bytes", "n"]
        tables.append(markdown_table(heads, rows))
    if figures["ratios"]:
        rows = [
            [
                e["row"],
                f"{e['share']:g}",
                e["best"],
                f"{e['ratio']:.2f}",
                interval_cell(e["difference"]),
                f"{e['difference']['p']:.4f}",
            ]
            for e in figures["ratios"]
        ]
        heads = ["method", "share", "best that drops keys", "ratio of KL", "difference", "p"]
        tables.append(markdown_table(heads, rows))
    return "\n\n".join(tables)
