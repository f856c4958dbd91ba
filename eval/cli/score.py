"""Run ``mame-sd-eval score``: two runs in, JSON or a table out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mame_sd.errors import UserError
from mame_sd.runs.files import shown
from mame_sd.runs.generate import versions
from mame_sd.runs.run_folder import differences, in_short

from ..metric_list import METRICS, Metric
from ..results.schema import Value
from ..scoring.reference import check_foreign, check_reference, open_reference
from ..scoring.runs import Run, differing_settings, pair
from ..scoring.score import measured
from ..scoring.sets import too_few
from ..scoring.tools import Tools
from ..tables import markdown_table


def score_runs(
    a: Run,
    b: Run,
    reference: Path | None,
    metrics: Sequence[Metric],
    tools: Tools,
    on_note: Callable[[str], None],
) -> dict[str, Any]:
    """Score run `b` against the baseline run `a`.

    Args:
        a: the baseline's run.
        b: the run to score.
        reference: run folder or folder of images that quality is measured against, if any.
        metrics: the metrics.
        tools: what computes them.
        on_note: called with each remark on the runs or on a value.

    Returns:
        "metrics", a `Value` by name; and "manifest", what was scored by which means.

    Raises:
        UserError: runs that do not pair, images that can't be compared, no weights, no reference
            where one is needed.
    """
    if b.plain and any(metric.needs == "image" for metric in metrics):
        raise UserError(
            "--metrics clip_score: expected a run folder, which knows its prompts, got a folder of"
            " images; leave it out"
        )
    pairs = pair(a, b)
    against = None if reference is None else open_reference(reference)
    check_reference(metrics, against)
    different = differing_settings(a, b)
    for text in different:
        on_note(f"the runs differ not only in the method ({text})")
    if not (a.plain or b.plain) and (elsewhere := differences(a.environment, b.environment)):
        on_note(
            "the runs were made in different environments, so images differ a little for that alone"
            f" ({in_short(elsewhere)})"
        )
    check_foreign(against, a, b)
    for metric in metrics:
        if too_few(metric, b, against) is None:
            tools.network(metric)  # missing weights are found before anything is computed
    values = measured(b, pairs, against, metrics, tools)
    found = {name: value for name, (value, _) in values.items()}
    for name, value in found.items():
        withheld = value.withheld and f"withheld, {value.withheld}"
        for text in filter(None, (withheld, value.equal_note, value.remark)):
            on_note(f"{name}: {text}")
    return {
        "metrics": found,
        "manifest": {
            "run_a": _about(a),
            "run_b": _about(b),
            "differing_settings": different,
            "reference": None if against is None else against.about(),
            "networks": tools.about(),
            "device": str(tools.device),
            "threads": torch.get_num_threads(),
            "versions": versions(),
        },
    }


def scores_table(metrics: Mapping[str, Value]) -> str:
    """Return the scores as a table."""
    rows = (_table_row(METRICS[name], value) for name, value in metrics.items())
    return markdown_table(("metric", "mean", "95 % interval", "n"), rows)


def _table_row(metric: Metric, value: Value) -> tuple[str, str, str, str]:
    label = metric.label + (f" ({metric.unit})" if metric.unit else "")
    if value.mean is None:
        return label, "withheld", value.withheld or "", str(value.n)
    digits = metric.digits
    spread = f"± {value.std:.{digits}f}" if value.std else "-"
    if value.low is not None:
        spread = f"{value.low:.{digits}f} to {value.high:.{digits}f}"
    return label, f"{value.mean:.{digits}f}", spread, str(value.n)


def _about(run: Run) -> dict[str, Any]:
    return {
        "name": shown(run.folder.resolve().name),
        "images": len(run.items),
        "settings": dict(run.settings),
        "environment": dict(run.environment),
    }
