"""The timings of ``mame-sd-eval bench`` as a table, JSON or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

from ..json_text import json_text
from ..metric_list import METRICS

_COLUMNS = ("latency", "denoising", "cpu", "memory", "memory_denoising")
_FIELDS = ("mean", "low", "high", "n")


def format_bench(bench: Mapping[str, Mapping[str, Any]], form: str) -> str:
    """What `run_bench` gives, as "table", "json" or "csv".

    The first row is what the others' speed refers to.
    """
    if form == "json":
        return json_text(dict(bench))
    found = bench["rows"]
    names = [name for name in _COLUMNS if any(name in costs for costs in found.values())]
    if form == "csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["row", "metric", *_FIELDS])
        for row, costs in found.items():
            writer.writerows(
                [row, name, *(costs[name].get(key) for key in _FIELDS)]
                for name in names
                if name in costs
            )
        return text.getvalue().rstrip("\n")
    first = next(iter(found.values()))
    table = [
        (
            "row",
            *(f"{METRICS[name].label} ({METRICS[name].unit})" for name in names),
            "times faster",
        )
    ]
    for row, costs in found.items():
        speed = first["latency"]["mean"] / costs["latency"]["mean"]
        table.append((row, *(_cell(name, costs.get(name)) for name in names), f"{speed:.2f}"))
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


def _cell(name: str, value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "-"
    digits = METRICS[name].digits
    spread = (
        f" ({value['low']:.{digits}f} to {value['high']:.{digits}f})"
        if value.get("low") is not None
        else ""
    )
    return f"{value['mean']:.{digits}f}{spread}"
