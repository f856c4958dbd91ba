"""The body of ``mame-sd-eval score``: two runs in; JSON, CSV or a table out."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mame_sd.errors import UserError
from mame_sd.runs.files import shown
from mame_sd.runs.generate import versions
from mame_sd.runs.records import Sample

from ..images import size_of, turned_note
from ..json_text import json_text
from ..metric_list import METRICS, Metric
from ..remarks import equal_images, remark
from ..scoring.reference import check_reference, open_reference
from ..scoring.runs import Run, differing_settings, pair
from ..scoring.score import cut_prompts, score
from ..scoring.tools import Tools

NEED_PROMPTS = ("clip_score", "retrieval", "background")
_FIELDS = ("mean", "low", "high", "n")


def score_runs(
    folder_a: Path,
    folder_b: Path,
    reference: Path | None,
    metrics: Sequence[Metric],
    tools: Tools,
    on_note: Callable[[str], None],
) -> dict[str, Any]:
    """`metrics` of the run in `folder_b`, against that in `folder_a`, and the manifest of the
    scoring.

    Raises:
        UserError: runs that do not pair, images that can't be compared, no weights, no reference
            where one is needed.
    """
    a, b = Run.open_any(folder_a), Run.open_any(folder_b)
    asking = [metric.name for metric in metrics if metric.name in NEED_PROMPTS]
    if b.plain and asking:
        raise UserError(
            f"--metrics {', '.join(asking)}: expected a run folder, which knows its prompts, got a"
            " folder of images; leave them out"
        )
    pairs = pair(a, b)
    against = None if reference is None else open_reference(reference)
    check_reference(metrics, against)
    files = [item.path for run in (a, b) for item in run.items.values()]
    if said := turned_note([*files, *(against.files if against is not None else ())]):
        on_note(said)
        if any(map(tools.by_clean_fid, metrics)):
            on_note("clean-fid reads the files by itself and doesn't turn them")
    different = differing_settings(a, b)
    for text in different:
        on_note(f"the runs differ beside the method ({text})")
    found = score(a, b, pairs, against, metrics, tools)
    cut, prompts = cut_prompts(metrics, b, tools)
    if cut:
        on_note(f"CLIP read {cut} of {prompts} prompts only in part (77 tokens)")
    for name, value in found.items():
        for text in (
            value.get("withheld") and f"withheld, {value['withheld']}",
            equal_images(value),
            remark(value),
        ):
            if text:
                on_note(f"{name}: {text}")
    return {
        "metrics": found,
        "manifest": {
            "run_a": _about(a),
            "run_b": _about(b),
            "differing_settings": different,
            "reference": None if against is None else against.about(),
            "networks": tools.about(),
            "prompts_cut_for_clip": cut,
            "device": str(tools.device),
            "threads": torch.get_num_threads(),
            "versions": versions(),
        },
    }


def format_scores(found: Mapping[str, Any], form: str) -> str:
    """The scores as table, json or csv."""
    if form == "json":
        return json_text(dict(found))
    if form == "csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["metric", *_FIELDS, "withheld", "remark"])
        for name, value in found["metrics"].items():
            remarks = "; ".join(filter(None, (equal_images(value), remark(value))))
            writer.writerow(
                [name, *(value.get(key) for key in _FIELDS), value.get("withheld"), remarks]
            )
        return text.getvalue().rstrip("\n")
    rows = [("metric", "mean", "95 % interval", "n")]
    rows += [_table_row(METRICS[name], value) for name, value in found["metrics"].items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _table_row(metric: Metric, value: Mapping[str, Any]) -> tuple[str, str, str, str]:
    def number(key: str) -> str:
        found = value[key]
        return f"{found:.{metric.digits}f}" if math.isfinite(found) else str(found)

    label = metric.label + (f" ({metric.unit})" if metric.unit else "")
    if value.get("mean") is None:
        return label, "withheld", str(value.get("withheld", "")), str(value["n"])
    spread = f"± {number('std')}" if value.get("std") else "-"
    interval = f"{number('low')} to {number('high')}" if value.get("low") is not None else spread
    return label, number("mean"), interval, str(value["n"])


def _size(item: Sample) -> str:
    """Width x height, of the file where the run's record has none."""
    width, height = (item.row.get(name) for name in ("width", "height"))
    if width is None or height is None:
        width, height = size_of(item.path)
    return f"{width}x{height}"


def _about(run: Run) -> dict[str, Any]:
    sizes = sorted({_size(item) for item in run.items.values()})
    return {
        "name": shown(run.folder.resolve().name),
        "images": len(run.items),
        "sizes": sizes,
        "settings": dict(run.settings),
        "environment": dict(run.environment),
    }
