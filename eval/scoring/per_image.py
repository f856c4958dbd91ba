"""Compute metrics of single images: fidelity of pairs, quality of images with their prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from mame_sd.errors import UserError

from ..images import load_image, to_float
from ..metric_list import Metric
from ..metrics.clip import clip_score
from ..metrics.psnr import object_psnr, psnr
from ..metrics.ssim import ssim
from .runs import Pair, Run
from .tools import Tools

Values = dict[str, float]
PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "psnr": psnr,
    "psnr_object": object_psnr,
    "ssim": ssim,
}


def pair_values(
    metrics: Sequence[Metric], pairs: Sequence[Pair], tools: Tools
) -> dict[str, Values]:
    """Compute metrics of each pair, by metric and key.

    Args:
        metrics: metrics that need "pair".
        pairs: the pairs.
        tools: what computes them.

    Raises:
        UserError: an image is broken, or sizes differ within a pair or are too small for a
            metric; the message names the file.
    """
    functions = {metric.name: _pairwise(metric, tools) for metric in metrics}
    by_metric: dict[str, Values] = {name: {} for name in functions}
    tools.on_progress(0, len(pairs))
    for number, pair in enumerate(pairs, 1):
        one, other = (to_float([load_image(path)]).to(tools.device) for path in (pair.a, pair.b))
        for name, function in functions.items():
            try:
                by_metric[name][pair.key] = function(one, other).item()
            except ValueError as error:
                raise UserError(
                    f"{name} of {pair.b}: {error}; leave it out, or use other images"
                ) from None
        tools.on_progress(number, len(pairs))
    return by_metric


def image_values(metric: Metric, run: Run, tools: Tools) -> Values:
    """Compute the CLIP score, which needs "image", for each image of a run.

    Args:
        metric: the metric.
        run: the run.
        tools: what computes it.

    Returns:
        Values by key.
    """
    network = tools.network(metric)
    scores: Values = {}
    tools.on_progress(0, len(run.items))
    for item in run.items.values():
        pixels = to_float([load_image(item.path)]).to(tools.device)
        scores[item.key] = clip_score(network, pixels, [item.prompt]).item()
        tools.on_progress(len(scores), len(run.items))
    return scores


def _pairwise(metric: Metric, tools: Tools) -> Callable[[Tensor, Tensor], Tensor]:
    network: Any = tools.network(metric)
    return PAIRWISE.get(metric.name, network)
