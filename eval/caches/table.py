"""Write the table of `mame-sd-eval cache`.

It has means over passages, and paired differences to the best method that drops keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import exp
from operator import itemgetter
from statistics import fmean
from typing import Any

from ..stats import mean_interval, paired_difference
from ..tables import interval_cell, markdown_table
from .rows import DEFAULT, PUBLISHED, all_rows

MEANS = ("nll", "kept", "bytes")


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all figures of the table as JSON values.

    "texts" has the means of each row and share, "ratios" the ratio of our KL to that of the best
    published method, with the paired difference.
    """
    order = ("full", *all_rows())
    lines = sorted(results, key=lambda line: (-line["share"], order.index(line["row"])))
    figures: dict[str, Any] = {"texts": [], "ratios": [], "full_nll": None}
    for share, of_share in groupby(lines, itemgetter("share")):
        rows = {row: list(group) for row, group in groupby(of_share, itemgetter("row"))}
        values = {row: {one["case"]: one["kl"] for one in group} for row, group in rows.items()}
        for row, kl in values.items():
            means = {name: fmean(one[name] for one in rows[row]) for name in MEANS}
            if row == "full":
                figures["full_nll"] = means["nll"]
                continue
            about, each = {"row": row, "share": share}, {case: case for case in kl}
            figures["texts"].append({**about, "kl": mean_interval(kl, each), **means})
            rivals = [r for r in PUBLISHED if r in values and values[r].keys() >= kl.keys()]
            if not row.startswith(DEFAULT) or not rivals:
                continue
            totals = {rival: sum(values[rival][case] for case in kl) for rival in rivals}
            best = min(rivals, key=totals.__getitem__)
            gap = paired_difference(kl, {case: values[best][case] for case in kl}, each)
            ratio = sum(kl.values()) / totals[best]
            figures["ratios"].append({**about, "best": best, "ratio": ratio, "difference": gap})
    return figures


def format_table(figures: Mapping[str, Any]) -> str:
    """Format the figures as Markdown: KL by row and share, and ratios."""
    shares = list(dict.fromkeys(e["share"] for e in figures["texts"]))
    rows = []
    if figures["full_nll"] is not None:
        rows.append(["full", *("0" for _ in shares), f"{exp(figures['full_nll']):.2f}", "1.00", ""])
    for row in dict.fromkeys(e["row"] for e in figures["texts"]):
        entries = {e["share"]: e for e in figures["texts"] if e["row"] == row}
        cells = [interval_cell(entries[s]["kl"]) if s in entries else "" for s in shares]
        perplexity = " ".join(f"{exp(e['nll']):.2f}" for e in entries.values())
        size = " ".join(f"{e['bytes']:.2f}" for e in entries.values())
        rows.append([row, *cells, perplexity, size, str(entries[min(entries)]["kl"]["n"])])
    heads = ["method", *(f"KL at {s:g}" for s in shares), "perplexity", "bytes", "n"]
    tables = [markdown_table(heads, rows)] if shares else []
    ratios = []
    for e in figures["ratios"]:
        gap = e["difference"]
        numbers = [f"{e['ratio']:.2f}", interval_cell(gap), f"{gap['p']:.4f}"]
        ratios.append([e["row"], f"{e['share']:g}", e["best"], *numbers])
    if ratios:
        heads = ["method", "share", "best that drops keys", "ratio of KL", "difference", "p"]
        tables.append(markdown_table(heads, ratios))
    return "\n\n".join(tables)
