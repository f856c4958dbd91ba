"""The table of `mame-sd-eval cache`: means over passages, and paired differences to the best method
that drops keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..stats import mean_interval, paired_difference, wilson
from ..tables import markdown_table
from .rows import DEFAULT, PUBLISHED, all_rows

Results = Sequence[Mapping[str, Any]]


def summary(results: Results) -> dict[str, Any]:
    """All figures of the table, for JSON."""
    rows = list(all_rows())
    texts = [r for r in results if r["kind"] == "text"]
    found: dict[str, Any] = {"texts": [], "ratios": [], "retrieval": []}
    for share in sorted({r["share"] for r in texts if r["row"] != "full"}, reverse=True):
        values = {row: _by_case(texts, row, share, "kl") for row in rows}
        values = {row: v for row, v in values.items() if v}
        for row, kl in values.items():
            entry = {"row": row, "share": share, "kl": mean_interval(kl, {c: c for c in kl})}
            for name in ("nll", "kept", "bytes"):
                other = _by_case(texts, row, share, name)
                entry[name] = sum(other.values()) / len(other)
            found["texts"].append(entry)
        found["ratios"].extend(_ratios(values, share))
    found["full_nll"] = _mean(_by_case(texts, "full", 1.0, "nll"))
    for task in sorted({r["kind"] for r in results} - {"text"}):
        asked = [r for r in results if r["kind"] == task]
        full = _by_case(asked, "full", 1.0, "right")
        found["retrieval"].append({"task": task, "row": "full", "share": 1.0, **_right(full)})
        for share in sorted({r["share"] for r in asked if r["row"] != "full"}, reverse=True):
            for row in rows:
                right = _by_case(asked, row, share, "right")
                if right:
                    found["retrieval"].append(
                        {"task": task, "row": row, "share": share, **_right(right)}
                    )
    return found


def _ratios(values: Mapping[str, Mapping[str, float]], share: float) -> list[dict[str, Any]]:
    """Of ours by the best published method on the same passages, and the paired difference."""
    found = []
    for row in values:
        if not row.startswith(DEFAULT):
            continue
        rivals = {
            r: v for r, v in values.items() if r in PUBLISHED and v.keys() >= values[row].keys()
        }
        if not rivals:
            continue
        cases = values[row]
        best = min(rivals, key=lambda r: sum(rivals[r][c] for c in cases))
        other = {c: rivals[best][c] for c in cases}
        gap = paired_difference(cases, other, {c: c for c in cases})
        ratio = sum(cases.values()) / sum(other.values())
        found.append({"row": row, "share": share, "best": best, "ratio": ratio, "difference": gap})
    return found


def _by_case(results: Results, row: str, share: float, name: str) -> dict[str, float]:
    return {r["case"]: r[name] for r in results if r["row"] == row and r["share"] == share}


def _mean(values: Mapping[str, float]) -> float | None:
    return sum(values.values()) / len(values) if values else None


def _right(values: Mapping[str, float]) -> dict[str, Any]:
    return wilson(int(sum(values.values())), len(values))


def format_table(found: Mapping[str, Any]) -> str:
    """Markdown: KL by row and share, ratios, retrieval."""
    tables: list[str] = []
    shares = list(dict.fromkeys(e["share"] for e in found["texts"]))
    if shares:
        rows: list[list[str]] = []
        full = found["full_nll"]
        if full is not None:
            rows.append(["full", *("0" for _ in shares), _perplexity(full), "1.00", ""])
        for row in dict.fromkeys(e["row"] for e in found["texts"]):
            own = {e["share"]: e for e in found["texts"] if e["row"] == row}
            last = own[min(own)]
            cells = [_interval(own[s]["kl"]) if s in own else "" for s in shares]
            size = " ".join(f"{own[s]['bytes']:.2f}" for s in shares if s in own)
            loss = " ".join(_perplexity(own[s]["nll"]) for s in shares if s in own)
            rows.append([row, *cells, loss, size, str(last["kl"]["n"])])
        heads = ["method", *(f"KL at {s:g}" for s in shares), "perplexity", "bytes", "n"]
        tables.append(markdown_table(heads, rows))
    if found["ratios"]:
        rows = [
            [
                e["row"],
                f"{e['share']:g}",
                e["best"],
                f"{e['ratio']:.2f}",
                _interval(e["difference"]),
                f"{e['difference']['p']:.4f}",
            ]
            for e in found["ratios"]
        ]
        heads = ["method", "share", "best that drops keys", "ratio of KL", "difference", "p"]
        tables.append(markdown_table(heads, rows))
    if found["retrieval"]:
        tables.append(_retrieval(found["retrieval"]))
    return "\n\n".join(tables)


def _retrieval(entries: Sequence[Mapping[str, Any]]) -> str:
    """Per cent right: the full cache of all prompts, the others of those that it answers."""
    cells = {(e["row"], e["task"], e["share"]): e for e in entries}
    columns = list(dict.fromkeys((e["task"], e["share"]) for e in entries if e["row"] != "full"))
    full = [cells["full", task, 1.0] for task, _ in columns]
    rows = [["full", *map(_right_cell, full), _counts(full)]]
    for row in dict.fromkeys(e["row"] for e in entries if e["row"] != "full"):
        own = [cells.get((row, *column)) for column in columns]
        rows.append([row, *(_right_cell(e) if e else "" for e in own), _counts(own)])
    heads = ["method", *(f"{task} at {share:g}" for task, share in columns), "n"]
    return markdown_table(heads, rows)


def _right_cell(entry: Mapping[str, Any]) -> str:
    return f"{entry['mean']:.0f} ({entry['low']:.0f} to {entry['high']:.0f})"


def _counts(entries: Sequence[Mapping[str, Any] | None]) -> str:
    """How many prompts the cells of each task rest on."""
    return " ".join(dict.fromkeys(str(e["n"]) for e in entries if e))


def _interval(value: Mapping[str, Any]) -> str:
    if value["low"] is None:
        return f"{value['mean']:.3f}"
    return f"{value['mean']:.3f} ({value['low']:.3f} to {value['high']:.3f})"


def _perplexity(loss: float) -> str:
    return f"{2.718281828459045**loss:.2f}"
