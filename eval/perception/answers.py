"""Measure one row: its answers to every image, with tokens and FLOPs of every batch, and its speed.

    OUT/answers/<row>.jsonl     a head that says what they belong to, then a line per batch
    OUT/bench.jsonl             every timing

Both files grow as results are made, so that a stopped run continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..benchmark.timings import Timing, timed_rounds, timing_of
from ..runner import Store, measure_cases
from ..timing import peak_bytes, weight_bytes
from .data import ImageSet
from .heads import Head
from .methods import Method

FORMAT = "mame-sd answers 4"
KEYS = ("batch", "files")  # `files`: a digest of the names and sizes of its files
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Batch:
    """Results of one batch.

    Attributes:
        answers: the class of each image.
        flops: multiply-adds for one image.
        tokens: tokens before the first block, then after each block.
    """

    answers: list[int]
    flops: float
    tokens: list[float]


@dataclass(frozen=True)
class Asked:
    """What is measured: a model that answers, images, and the size of a batch."""

    head: Head
    images: ImageSet
    size: int

    @property
    def batches(self) -> list[range]:
        """Indices of the images of each batch."""
        return self.images.batches(self.size)

    def inputs(self, places: Sequence[int]) -> dict[str, Tensor]:
        """Return the model's arguments for the images or clips at these indices."""
        return self.head.encoder.inputs(self.images.load(places))


@torch.no_grad()
def answers_of(
    asked: Asked,
    method: Method,
    file: Path,
    about: Mapping[str, Any],
    on_progress: Progress,
) -> list[Batch]:
    """Answer every batch under `method`.

    Batches that `file` holds are not computed again if they belong to the same `about` and to
    unchanged images.

    Args:
        asked: the model and the images.
        method: what the row does to the model.
        file: JSON lines that hold the answers.
        about: everything that decides the answers, as JSON values.
        on_progress: called with the number of images done and of all images.

    Returns:
        All batches in order.

    Raises:
        UserError: an image can't be read, or `file` isn't one of this version; what was done
            before is kept.
    """
    batches, images = asked.batches, asked.images
    files = [images.digest(images.files[place] for place in batch) for batch in batches]
    store = Store(file, FORMAT, "answers", about, KEYS, fresh=True)

    def key(number: int, row: None) -> dict[str, Any]:
        return {"batch": number, "files": files[number]}

    def measure(number: int, rows: Sequence[None]) -> Iterator[tuple[None, dict[str, Any]]]:
        inputs = asked.inputs(batches[number])
        with method.counting(asked.head.encoder.model) as handle:
            answers = asked.head.logits(inputs).argmax(-1).tolist()
            report = handle.report()
        tokens = [report.layers[0].tokens_in, *(block.tokens_kept for block in report.layers)]
        yield None, {"answers": answers, "flops": report.flops, "tokens": tokens}

    def tell(count: int, total: int) -> None:
        on_progress(min(count * asked.size, len(images.files)), len(images.files))

    measure_cases(store, range(len(batches)), [None], measure, key, on_progress=tell)
    try:
        return [_batch(store.lines[one]) for one in enumerate(files)]
    except TypeError as error:
        raise store.refused(error) from None


def _batch(line: Mapping[str, Any]) -> Batch:
    return Batch(**{name: value for name, value in line.items() if name not in KEYS})


@torch.no_grad()
def speed_of(
    asked: Asked,
    methods: Mapping[str, Method],
    rounds: int,
    record: Path,
    about: Mapping[str, Any],
    on_progress: Progress,
) -> dict[str, list[Timing]]:
    """Time one batch with every method, each round on the next whole batch.

    The timed part is the model from prepared images to logits.

    Args:
        asked: the model and the images.
        methods: the methods by name.
        rounds: number of rounds.
        record: file of timings, see `timed_rounds`.
        about: everything that timings depend on, as JSON values; "methods" by name.
        on_progress: called with the number of calls done and of all calls.

    Returns:
        Timings by name in the order of rounds.
    """
    head, model = asked.head, asked.head.encoder.model
    alike = [batch for batch in asked.batches if len(batch) == len(asked.batches[0])]
    device = head.encoder.device
    ready: dict[int, Mapping[str, Tensor]] = {}
    peaks: dict[str, int] = {}

    def inputs(number: int) -> Mapping[str, Tensor]:
        place = number % len(alike)
        if place not in ready:
            ready.clear()
            ready[place] = asked.inputs(alike[place])
        return ready[place]

    def warm_up(name: str) -> None:
        batch = inputs(0)
        with methods[name].on(model):
            head.logits(batch)
            if device.type == "cpu":  # CUDA counts while it is timed, a CPU in a separate call
                peaks[name] = weight_bytes([model]) + peak_bytes(lambda: head.logits(batch))

    def call(name: str, number: int) -> Timing:
        batch = inputs(number)
        with methods[name].on(model):
            if device.type == "cuda":
                head.logits(batch)  # the first after a change of rows fills caches
            timing = timing_of(lambda: head.logits(batch), len(alike[0]), device)
        peak = peaks.get(name, timing.allocated)
        return replace(timing, allocated=peak, cpu=None)  # which no record of these timings has

    return timed_rounds(
        list(methods), rounds, call, record, about, warm_up=warm_up, on_progress=on_progress
    )
