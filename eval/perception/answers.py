"""What is measured of one row: its answers to every image, with tokens and FLOPs of every batch,
and its speed.

    OUT/answers/<row>.<rank>.jsonl     a head that says what they are of, then a line for each batch
    OUT/bench.jsonl                    every timing

Both are kept as they are made, so that a stopped run continues. Batches are shared among processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mame_sd.runs.processes import Process

from ..benchmark.timings import Timing, timed_rounds
from ..memory import allocations, most, weight_bytes
from ..store import Store, another_file, read_store
from ..timing import timed
from .data import ImageSet
from .heads import Head, inputs_of
from .methods import Method

FORMAT = "mame-sd answers 4"
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Batch:
    """One batch.

    Attributes:
        answers: the class of each image.
        flops: multiply-adds for one of them.
        tokens: before the first block, then after each one.
        files: a digest of the names and sizes of its files.
    """

    answers: list[int]
    flops: float
    tokens: list[float]
    files: str


Batches = dict[int, Batch]


@torch.no_grad()
def answers_of(
    head: Head,
    method: Method,
    images: ImageSet,
    size: int,
    file: Path,
    about: Mapping[str, Any],
    process: Process,
    on_progress: Progress,
) -> Batches:
    """Every batch of `images` under `method`, by number, on every process; what `file` holds of
    just `about` is not made again.

    Args:
        size: of a batch.
        file: without the rank, which is put before its suffix.
        about: all that decides the answers, as JSON values.

    Raises:
        UserError: an image that can't be read; what was done before is kept.
    """
    batches = images.batches(size)
    files = [images.digest(images.files[place] for place in batch) for batch in batches]
    done = read_batches(file, about, files)
    process.wait()  # everyone has read before anyone writes
    mine = [number for number in range(len(batches)) if number not in done]
    path = file.with_name(f"{file.stem}.{process.rank}{file.suffix}")
    store = Store(path, FORMAT, "answers", about, ("batch",), fresh=True)
    own: Batches = {}
    count, total = sum(len(batches[number]) for number in done), len(images.files)
    on_progress(count, total)
    for number in mine[process.rank :: process.count]:
        inputs = inputs_of(head.encoder, images, batches[number])
        with method.counted(head.encoder.model) as handle:
            answers = head.logits(inputs).argmax(-1).tolist()
            report = handle.report()
        tokens = [report.blocks[0].tokens_in, *(block.tokens_kept for block in report.blocks)]
        own[number] = Batch(answers, report.flops, tokens, files[number])
        store.add({"batch": number, **asdict(own[number])})
        count += len(answers)
        on_progress(count, total)
    for found in process.all_gather(own):
        done.update(found)
    return dict(sorted(done.items()))


def read_batches(file: Path, about: Mapping[str, Any], files: Sequence[str]) -> Batches:
    """The batches that the files of all processes hold of just `about`, and of images as they are
    now, whose digests `files` has by batch.

    Raises UserError for a file that is none of this version.
    """
    found: Batches = {}
    for path in sorted(file.parent.glob(f"{file.stem}.*{file.suffix}")):
        if not path.suffixes[-2][1:].isdigit():
            continue
        lines = read_store(path, FORMAT, "answers", about, ("batch",), fresh=True)
        try:
            for (number,), line in lines.items():
                if number < len(files) and line["files"] == files[number]:
                    found[number] = Batch(**{k: v for k, v in line.items() if k != "batch"})
        except (KeyError, TypeError) as error:
            raise another_file(path, FORMAT, "answers", error) from None
    return found


@torch.no_grad()
def speed_of(
    head: Head,
    methods: Mapping[str, Method],
    images: ImageSet,
    size: int,
    rounds: int,
    record: Path,
    about: Mapping[str, Any],
    on_progress: Progress,
) -> dict[str, list[Timing]]:
    """Time one batch with every method, `rounds` times over, each round on the next batch of this
    size; by name, in order of rounds.

    What is timed is the model from prepared images to logits.

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
            ready[place] = inputs_of(head.encoder, images, alike[place])
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
