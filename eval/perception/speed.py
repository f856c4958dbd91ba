"""Images per second and peak memory of several methods on one model, timed interleaved: each round
on the next batch of images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..benchmark.timings import Timing, timed_rounds
from ..memory import allocations, most, weight_bytes
from ..results.schema import Value
from ..timing import quartiles, timed
from .answers import inputs_of
from .data import ImageSet
from .heads import Head
from .methods import Method


@torch.no_grad()
def measure(
    head: Head,
    methods: Mapping[str, Method],
    images: ImageSet,
    size: int,
    rounds: int,
    record: Path,
    about: Mapping[str, Any],
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> dict[str, list[Timing]]:
    """Time one batch with every method, `rounds` times over; by name, in order of rounds.

    What is timed is the model from prepared images to logits, on batches of one size.

    Args:
        record: see `timed_rounds`.
        about: all that timings depend on, as JSON values; "methods" by name.
    """
    alike = [batch for batch in images.batches(size) if len(batch) == min(size, len(images.files))]
    ready: dict[int, Mapping[str, Tensor]] = {}
    device, model = head.encoder.device, head.encoder.model
    peaks: dict[str, int] = {}

    def inputs(number: int) -> Mapping[str, Tensor]:
        place = number % len(alike)
        if place not in ready:
            ready.clear()
            ready[place] = inputs_of(head, images, alike[place])
        return ready[place]

    def warm_up(name: str) -> None:
        given = inputs(0)
        with methods[name].on(model):
            head.logits(given)
            if device.type == "cpu":  # CUDA counts while it is timed, the CPU in a call of its own
                peaks[name] = weight_bytes([model]) + most(allocations(lambda: head.logits(given)))

    def call(name: str, number: int) -> Timing:
        given = inputs(number)
        with methods[name].on(model):
            if device.type == "cuda":
                head.logits(given)  # the first after a change of rows fills caches
                torch.cuda.reset_peak_memory_stats(device)
            logits, seconds = timed(lambda: head.logits(given), device)
            timing = Timing(seconds / len(logits))
            if device.type == "cuda":
                return replace(timing, allocated=torch.cuda.max_memory_allocated(device))
            return replace(timing, allocated=peaks.get(name))

    return timed_rounds(
        list(methods), rounds, call, record, about, warm_up=warm_up, on_progress=on_progress
    )


def throughput(timings: Sequence[Timing]) -> Value:
    """Images per second: median and quartiles over rounds."""
    low, median, high = quartiles([1 / timing.seconds for timing in timings])
    return Value(mean=median, low=low, high=high, n=len(timings), statistic="median, quartiles")
