"""Values of single images: fidelity of pairs, and quality of images with their prompts, by key.

Processes share images by ``index[rank::count]``. What they find is gathered in the order of the
run, so their number changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from mame_sd.errors import UserError
from mame_sd.runs.records import Sample

from ..images import load_image, to_float
from ..metric_list import Metric
from ..metrics.psnr import psnr
from ..metrics.ssim import ms_ssim, ssim
from .retrieval import truth_of
from .runs import Pair, Run
from .tools import Tools

Values = dict[str, float]
PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "psnr": psnr,
    "ssim": ssim,
    "ms_ssim": ms_ssim,
}
TRUTH = ("retrieval", "background")


def pair_values(
    metrics: Sequence[Metric], pairs: Sequence[Pair], tools: Tools
) -> dict[str, Values]:
    """Each of `metrics` (needs "pair") for each pair, by metric and key; all of them on the main
    process only.

    Raises:
        UserError: a broken image, sizes that differ within a pair or are too small for a metric;
            the file is named.
    """
    functions = {metric.name: _pairwise(metric, tools) for metric in metrics}
    mine = pairs[tools.process.rank :: tools.process.count]
    found: dict[str, Values] = {name: {} for name in functions}
    tools.on_progress(0, len(mine))
    for number, pair in enumerate(mine, 1):
        a, b = load_image(pair.a), load_image(pair.b)
        if a.shape != b.shape:
            sizes = [f"{image.shape[1]} x {image.shape[0]}" for image in (a, b)]
            raise UserError(
                f"{pair.b}: expected the size of {pair.a}, {sizes[0]}, got {sizes[1]}; compare runs"
                " of one size"
            )
        one, other = (to_float([image]).to(tools.device) for image in (a, b))
        for name, function in functions.items():
            try:
                found[name][pair.key] = function(one, other).item()
            except ValueError as error:
                raise UserError(
                    f"{name} of {pair.b}: {error}; leave it out, or use other images"
                ) from None
        tools.on_progress(number, len(mine))
    return _in_order(found, [pair.key for pair in pairs], tools)


def image_values(metric: Metric, run: Run, tools: Tools) -> Values:
    """`metric` (needs "image") for each image of the run, by key; all of them on the main process
    only.
    """
    items = list(run.items.values())
    function = _imagewise(metric, run, tools)
    mine = items[tools.process.rank :: tools.process.count]
    found: Values = {}
    tools.on_progress(0, len(mine))
    for number, item in enumerate(mine, 1):
        found[item.key] = function(item)
        tools.on_progress(number, len(mine))
    return _in_order({metric.name: found}, [item.key for item in items], tools)[metric.name]


def _pairwise(metric: Metric, tools: Tools) -> Callable[[Tensor, Tensor], Tensor]:
    if metric.name in PAIRWISE:
        return PAIRWISE[metric.name]
    network = tools.network(metric)
    if metric.name == "clip_image":
        from ..metrics.clip import clip_image_cosine

        return lambda a, b: clip_image_cosine(network, a, b)
    found: Callable[[Tensor, Tensor], Tensor] = network
    return found


def _imagewise(metric: Metric, run: Run, tools: Tools) -> Callable[[Sample], float]:
    if metric.name in TRUTH:
        truth = truth_of(run.settings.get("model", {}))
        told = truth.retrieved if metric.name == "retrieval" else truth.background_right
        return lambda item: told(load_image(item.path), item.prompt)
    from ..metrics.clip import clip_score

    network = tools.network(metric)

    def of_clip(item: Sample) -> float:
        images = to_float([load_image(item.path)]).to(tools.device)
        return float(clip_score(network, images, [item.prompt]).scores.item())

    return of_clip


def _in_order(found: Mapping[str, Values], keys: Sequence[str], tools: Tools) -> dict[str, Values]:
    """Values of all processes, by name and in the order of `keys`; on other than the main process
    empty.
    """
    parts = tools.process.gather(dict(found))
    if not parts:
        return {name: {} for name in found}
    merged = {
        name: {key: value for part in parts for key, value in part[name].items()} for name in found
    }
    return {name: {key: values[key] for key in keys} for name, values in merged.items()}
