"""Answers of one row: the class of every image, and tokens and FLOPs of every batch, kept as they
are made.

    OUT/answers/<row>.<rank>.jsonl     a head that says what they are of, then a line for each batch

A stopped run continues after the last batch that was written; batches are shared among processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mame_sd.runs.processes import Process

from ..store import Store, another_file, read_store
from .data import ImageSet
from .encoders import check_size
from .heads import Head
from .methods import Method

FORMAT = "mame-sd answers 3"


@dataclass(frozen=True)
class Batch:
    """One batch.

    Attributes:
        answers: the class of each image.
        flops: multiply-adds for one of them.
        tokens: before the first block, then after each one.
        files: a digest of the names and sizes of its files.
        near: of a model that gives features alone, `Head.nearness`.
    """

    answers: list[int]
    flops: float
    tokens: list[float]
    files: str
    near: Mapping[str, list[float]] = field(default_factory=dict)


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
    on_progress: Callable[[int, int], object] = lambda done, total: None,
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
    store = Store(ranked(file, process.rank), FORMAT, "answers", about, ("batch",), fresh=True)
    own: Batches = {}
    count, total = sum(len(batches[number]) for number in done), len(images.files)
    on_progress(count, total)
    for number in mine[process.rank :: process.count]:
        inputs = inputs_of(head, images, batches[number])
        with method.counted(head.encoder.model) as handle:
            answers = head.logits(inputs).argmax(-1).tolist()
            report = handle.report()
        tokens = [report.blocks[0].tokens_in, *(block.tokens_kept for block in report.blocks)]
        near = head.nearness(method, inputs)
        own[number] = Batch(answers, report.flops, tokens, files[number], near)
        store.add({"batch": number, **asdict(own[number])})
        count += len(answers)
        on_progress(count, total)
    for found in process.all_gather(own):
        done.update(found)
    return dict(sorted(done.items()))


def inputs_of(head: Head, images: ImageSet, places: Sequence[int]) -> dict[str, Tensor]:
    """What the model is called with for the images or clips at these places.

    Raises UserError, naming it, for one that can't be read or is too small.
    """
    loaded = [images.load(place) for place in places]
    for place, one in zip(places, loaded, strict=True):
        check_size(one, str(images.folder / images.files[place]))
    return head.encoder.inputs(loaded)


def read_batches(file: Path, about: Mapping[str, Any], files: Sequence[str]) -> Batches:
    """The batches that the files of all processes hold of just `about`, and of images as they are
    now.

    Args:
        file: without the rank.
        about: as `answers_of` takes it.
        files: the digest of each batch's files.

    Raises UserError for a file that is none of this version.
    """
    found: Batches = {}
    ranks = file.parent.glob(f"{file.stem}.*{file.suffix}") if file.parent.is_dir() else []
    for path in sorted(path for path in ranks if path.suffixes[-2][1:].isdigit()):
        lines = read_store(path, FORMAT, "answers", about, ("batch",), fresh=True)
        try:
            for (number,), line in lines.items():
                if number < len(files) and line["files"] == files[number]:
                    found[number] = Batch(**{k: v for k, v in line.items() if k != "batch"})
        except (KeyError, TypeError) as error:
            raise another_file(path, FORMAT, "answers", error) from None
    return found


def ranked(file: Path, rank: int) -> Path:
    """The file of one process."""
    return file.with_name(f"{file.stem}.{rank}{file.suffix}")


def weighted(batches: Batches, value: Callable[[Batch], float]) -> float:
    """The mean over images of what is known of batches."""
    counts = [len(batch.answers) for batch in batches.values()]
    return sum(value(batch) * n for batch, n in zip(batches.values(), counts, strict=True)) / sum(
        counts
    )
