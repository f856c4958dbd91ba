"""Compute metrics of one run against another, each with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mame_sd.errors import UserError

from ..metric_list import Metric
from ..results.schema import Value
from ..stats import mean_interval
from .per_image import Values, image_values, pair_values
from .reference import Reference
from .runs import Pair, Run
from .sets import set_value
from .tools import Tools


def measured(
    b: Run,
    pairs: Sequence[Pair],
    reference: Reference | None,
    metrics: Sequence[Metric],
    tools: Tools,
) -> dict[str, tuple[Value, Values]]:
    """Compute metrics of run `b`.

    Args:
        b: the run.
        pairs: its images next to the baseline's.
        reference: the set that quality is measured against, or None.
        metrics: the metrics.
        tools: what computes them.

    Returns:
        By metric its value, and its values by image, which are empty for metrics of whole sets.
    """
    prompts = {item.key: item.prompt_id for item in b.items.values()}
    scores: dict[str, tuple[Value, Values]] = {}
    near = [metric for metric in metrics if metric.needs == "pair"]
    paired = pair_values(near, pairs, tools) if near else {}
    for metric in metrics:
        if metric.needs in ("pair", "image"):
            values = paired.get(metric.name) or image_values(metric, b, tools)
            scores[metric.name] = mean_value(metric, values, prompts, tools), values
        else:
            scores[metric.name] = set_value(metric, b, reference, tools), {}
    return scores


def mean_value(metric: Metric, values: Values, prompts: Mapping[str, str], tools: Tools) -> Value:
    """Compute the mean of per-image values with its interval; the note names the CLIP.

    Args:
        metric: the metric.
        values: its values by key.
        prompts: prompt id of each key.
        tools: what computed them.

    Raises:
        UserError: a value is NaN, which only broken weights give.
    """
    try:
        mean = Value(**mean_interval(values, prompts))
    except ValueError as error:
        raise UserError(
            f"{metric.name}: {error}; check the weights with mame-sd-eval weights"
        ) from None
    if metric.network != "clip":
        return mean
    return replace(mean, note="; ".join(filter(None, (tools.network(metric).name, mean.note))))
