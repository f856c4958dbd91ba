"""Every metric of one run against another, each with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mame_sd.errors import UserError

from ..metric_list import Metric, withheld_for_size
from ..stats import mean_interval, paired_difference
from .per_image import Values, image_values, pair_values
from .reference import Reference, check_foreign, check_reference
from .runs import Pair, Run
from .sets import set_value
from .tools import Tools, network_name


def score(
    a: Run,
    b: Run,
    pairs: Sequence[Pair],
    reference: Reference | None,
    metrics: Sequence[Metric],
    tools: Tools,
) -> dict[str, Any]:
    """Every one of `metrics` of run `b`, its fidelity measured against run `a`; by name.

    Each value has mean, low, high and n; a quality metric with values per image has also
    "difference", from `a`.

    Raises:
        UserError: whatever the metrics raise; nothing is left out in silence.
    """
    check_reference(metrics, reference)
    check_foreign(reference, a, b)
    for metric in metrics:
        if (
            withheld_for_size(metric, len(b.items), None if reference is None else reference.count)
            is None
        ):
            tools.network(metric)  # missing weights are found before anything is computed
    prompts = {item.key: item.prompt_id for item in a.items.values()}
    paired = pair_values([metric for metric in metrics if metric.needs == "pair"], pairs, tools)
    found: dict[str, Any] = {}
    for metric in metrics:
        if metric.needs == "pair":
            found[metric.name] = mean_value(metric, paired[metric.name], prompts, tools)
        elif metric.needs == "image":
            own, before = (image_values(metric, run, tools) for run in (b, a))
            difference = paired_difference(own, before, prompts)
            value = mean_value(metric, own, prompts, tools)
            found[metric.name] = {**value, "difference": difference}
        else:
            found[metric.name] = set_value(metric, b, a, reference, tools)
    return found


def mean_value(
    metric: Metric, values: Values, prompts: Mapping[str, str], tools: Tools
) -> dict[str, Any]:
    """The mean of per-image values with its interval (`mean_interval`); its note says which CLIP it
    is of.

    Raises UserError for NaN, which only broken weights give.
    """
    try:
        found = mean_interval(values, prompts)
    except ValueError as error:
        raise UserError(
            f"{metric.name}: {error}; check the weights with mame-sd-eval weights"
        ) from None
    if network_name(metric) == "clip":
        found["note"] = "; ".join(filter(None, (tools.network(metric).name, found.get("note"))))
    return found


def cut_prompts(metrics: Sequence[Metric], run: Run, tools: Tools) -> tuple[int, int]:
    """How many of the run's prompts, each counted once, the CLIP score read only in part, and how
    many there are.
    """
    prompts = sorted({item.prompt for item in run.items.values()})
    clip = tools.networks.get("clip")
    asked = any(metric.name == "clip_score" for metric in metrics)
    if not asked or clip is None or isinstance(clip, Exception):
        return 0, len(prompts)
    return len(clip.cut(prompts)), len(prompts)
