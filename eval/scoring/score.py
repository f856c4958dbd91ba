"""Every metric of one run against another, each with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mame_sd.errors import UserError

from ..metric_list import Metric
from ..results.schema import Value
from ..stats import mean_interval, paired_difference
from .per_image import Values, image_values, pair_values
from .reference import Reference, check_foreign, check_reference
from .runs import Pair, Run
from .sets import set_value
from .tools import Tools, network_name
from .withheld import too_few


def score(
    a: Run,
    b: Run,
    pairs: Sequence[Pair],
    reference: Reference | None,
    metrics: Sequence[Metric],
    tools: Tools,
) -> dict[str, Value]:
    """Every one of `metrics` of run `b`, its fidelity measured against run `a`; by name. A quality
    metric with values per image has also the difference from `a`.

    Raises:
        UserError: whatever the metrics raise; nothing is left out in silence.
    """
    check_reference(metrics, reference)
    check_foreign(reference, a, b)
    for metric in metrics:
        if too_few(metric, b, reference) is None:
            tools.network(metric)  # missing weights are found before anything is computed
    found = {}
    for name, (value, own) in measured(a, b, pairs, reference, metrics, tools).items():
        metric = next(metric for metric in metrics if metric.name == name)
        if metric.needs == "image":
            prompts = {item.key: item.prompt_id for item in a.items.values()}
            difference = paired_difference(own, image_values(metric, a, tools), prompts)
            value = replace(value, difference=difference)
        found[name] = value
    return found


def measured(
    a: Run,
    b: Run,
    pairs: Sequence[Pair],
    reference: Reference | None,
    metrics: Sequence[Metric],
    tools: Tools,
) -> dict[str, tuple[Value, Values]]:
    """The value of each of `metrics` of run `b`, and its values by image, empty for a set's."""
    prompts = {item.key: item.prompt_id for item in b.items.values()}
    found: dict[str, tuple[Value, Values]] = {}
    near = [metric for metric in metrics if metric.needs == "pair"]
    paired = pair_values(near, pairs, tools) if near else {}
    for metric in metrics:
        if metric.needs in ("pair", "image"):
            values = paired.get(metric.name) or image_values(metric, b, tools)
            found[metric.name] = mean_value(metric, values, prompts, tools), values
        else:
            found[metric.name] = set_value(metric, b, a, reference, tools), {}
    return found


def mean_value(metric: Metric, values: Values, prompts: Mapping[str, str], tools: Tools) -> Value:
    """The mean of per-image values with its interval (`mean_interval`); its note says which CLIP it
    is of.

    Raises UserError for NaN, which only broken weights give.
    """
    try:
        found = Value(**mean_interval(values, prompts))
    except ValueError as error:
        raise UserError(
            f"{metric.name}: {error}; check the weights with mame-sd-eval weights"
        ) from None
    if network_name(metric) != "clip":
        return found
    return replace(found, note="; ".join(filter(None, (tools.network(metric).name, found.note))))


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
