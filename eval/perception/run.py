"""Measure rows on a vision transformer: `mame-sd-eval classify`.

    OUT/answers.jsonl     a line for each row and batch: answers, tokens, FLOPs
    OUT/bench.jsonl       every timing

A stopped run continues with what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mame_sd.errors import MachineError, UserError
from mame_sd.runs.files import check_place
from mame_sd.runs.generate import environment
from mame_sd.runs.merging import NotApplicable
from mame_sd.runs.model_files import ModelChoice

from ..benchmark.timings import Timing, of_rounds, summary, timed_rounds, timing_of
from ..results.schema import Value
from ..runner import Stage, Store, measure_cases
from ..stats import mcnemar_p, wilson
from ..tables import markdown_table
from ..timing import peak_bytes, weight_bytes
from .data import ImageSet, labelled, open_images
from .encoders import LoadedEncoder, load_encoder
from .heads import Head, class_names, prompt_templates, text_head
from .methods import RIVALS, Method, at_flops
from .rows import BASELINE, Row
from .settings import ClassifySettings

FORMAT = "mame-sd classify 1"
# `files` is a digest of the names and sizes of the batch's files: a corrected one is answered again
KEYS = ("method", "batch", "files")
NEAR = 0.02  # of its FLOPs that a rival may miss without a note
Progress = Callable[[int, int], object]
# figures of a row as the table shows them: head, unit, digits
COLUMNS = {
    "flops": ("GFLOPs", "", 2),
    "throughput": ("images/s", "", 1),
    "speedup": ("times as fast", "", 2),
    "memory": ("MiB", "", 0),
    "tokens": ("tokens left", "", 1),
    "agreement": ("agreement", " %", 1),
    "top1": ("top-1", " %", 1),
}


@dataclass(frozen=True)
class Asked:
    """Hold a model that answers, the images it is asked about, and the size of a batch."""

    head: Head
    images: ImageSet
    size: int

    @property
    def batches(self) -> list[range]:
        """Return the indices of the images of each batch."""
        return self.images.batches(self.size)

    def inputs(self, places: Sequence[int]) -> dict[str, Tensor]:
        """Return the model's arguments for the images or clips at these indices."""
        return self.head.encoder.inputs(self.images.load(places))


@dataclass(frozen=True)
class Answers:
    """Results of a row; FLOPs and tokens are means over images.

    Attributes:
        flops: multiply-adds for one image.
        tokens: tokens after the last block.
    """

    classes: list[int]
    flops: float
    tokens: float


def run_classify(
    settings: ClassifySettings,
    rows: Sequence[Row],
    choice: ModelChoice,
    stage: Stage,
    on_note: Callable[[str], object],
) -> dict[str, Any]:
    """Measure rows on the images that the options name.

    Args:
        settings: the options of the command.
        rows: the baseline, then the rows, each rival after the row whose FLOPs it takes.
        choice: the model.
        stage: opens a step of that name and returns its progress callback.
        on_note: called with notes for the user.

    Returns:
        "about", what the figures depend on, and "rows": the figures of each row, or its reason.

    Raises:
        UserError, MachineError: what was done before is kept, and the same call continues.
    """
    out = settings.out or Path("out") / f"classify-{settings.suite}"
    check_place(out, out)
    assert settings.data is not None
    encoder = load_encoder(choice)
    images = open_images(settings.data, settings.num, encoder.frames)
    head, images, how = _head(encoder, images, settings)
    asked = Asked(head, images, settings.batch_size)
    about = {
        "model": encoder.identity,
        "answers": how,
        "batch": asked.size,
        "images": images.about(),
    }
    store = Store(out / "answers.jsonl", FORMAT, "answers", about, KEYS)
    before = _first_logits(asked)
    methods: dict[str, Method] = {}
    answers: dict[str, Answers] = {}
    lines: dict[str, dict[str, Any]] = {}
    values: dict[str, dict[str, Value]] = {}
    for row in rows:
        lines[row.name] = {"row": row.name, "label": row.label}
        try:
            method = _solved(row, answers, asked, on_note) if row.at else row.method
            with stage(f"{row.label}: answers") as on_progress:
                answers[row.name] = answers_of(asked, method, store, on_progress)
        except NotApplicable as error:
            lines[row.name]["reason"] = str(error)
            on_note(f"left out: {row.name} ({error})")
        else:
            methods[row.name] = method
            lines[row.name]["config"] = method.config
            values[row.name] = values_of(answers[row.name], answers[BASELINE], images.labels)
    about["environment"] = environment(encoder.device)
    with stage("speed and memory") as on_progress:
        record = out / "bench.jsonl"
        timings = speed_of(asked, methods, settings.rounds, record, about, on_progress)
    for name, taken in timings.items():
        costs = {
            **summary(taken, timings[BASELINE]),
            "throughput": of_rounds([1 / timing.seconds for timing in taken]),
        }
        values[name] |= {key: costs[key] for key in COLUMNS if key in costs}
        lines[name]["values"] = {key: value.to_json() for key, value in values[name].items()}
    if not torch.equal(_first_logits(asked), before):
        raise MachineError("expected the model as it was before all rows, but its answers changed")
    return {"about": about, "rows": list(lines.values())}


@torch.no_grad()
def _first_logits(asked: Asked) -> Tensor:
    return asked.head.logits(asked.inputs(asked.batches[0]))


def _head(
    encoder: LoadedEncoder, images: ImageSet, settings: ClassifySettings
) -> tuple[Head, ImageSet, dict[str, Any]]:
    """Return how the model answers, the images with its class numbers, and JSON values on both.

    Raises UserError if options or folders don't fit the model.
    """
    names, templates = settings.classes, settings.templates
    if not (encoder.classifies or encoder.compares_text):
        raise UserError(
            "--model: expected a model with a classifier or a text half, got"
            f" {type(encoder.model).__name__}; give one of these"
        )
    if not encoder.compares_text and (names or templates):
        flag = "--classes" if names else "--templates"
        raise UserError(
            f"{flag}: expected none for {type(encoder.model).__name__}, which has no text half;"
            " leave it out"
        )
    if encoder.classifies:
        how = None
        if images.labels is not None:
            images, how = labelled(images, encoder.labels)
        return Head(encoder), images, {"head": "the model's classifier", "labels": how}
    classes, prompts = class_names(names, images.classes), prompt_templates(templates, encoder)
    about = {"head": "zero-shot", "classes": classes, "templates": prompts}
    return text_head(encoder, classes, prompts), images, about


def _solved(
    row: Row, answers: Mapping[str, Answers], asked: Asked, on_note: Callable[[str], object]
) -> Method:
    """Return the rival at the FLOPs that were counted for another row."""
    assert row.rival is not None
    assert row.at is not None
    if row.at not in answers:
        raise NotApplicable(
            f"expected the FLOPs of {row.at}, which was not measured; measure it first"
        )
    target, inputs = answers[row.at].flops, asked.inputs([0])
    pixels = inputs["pixel_values"]
    side = int(pixels.shape[-1]) if pixels.dim() in (4, 5) else 0  # 0: they are patches
    call = partial(asked.head.logits, inputs)
    knob, flops = at_flops(asked.head.encoder.model, row.rival, target, call, side)
    if abs(flops / target - 1) > NEAR:
        got, wanted = f"{flops / 1e9:.3g}", f"{target / 1e9:.3g}"
        on_note(f"{row.label}: {got} GFLOPs is the nearest it can come to {wanted}")
    return RIVALS[row.rival].make(knob)


@torch.no_grad()
def answers_of(asked: Asked, method: Method, store: Store, on_progress: Progress) -> Answers:
    """Answer every batch that `store` lacks under `method`.

    Args:
        asked: the model and the images.
        method: what the row does to the model.
        store: the lines of results.
        on_progress: called with the number of images done and of all images.

    Raises:
        UserError: an image can't be read; what was done before is kept.
    """
    batches, images = asked.batches, asked.images
    files = [images.digest(images.files[place] for place in batch) for batch in batches]
    config = json.dumps(method.config, sort_keys=True)

    def key(number: int, row: None) -> dict[str, Any]:
        return {"method": config, "batch": number, "files": files[number]}

    def measure(number: int, rows: Sequence[None]) -> Iterator[tuple[None, dict[str, Any]]]:
        inputs = asked.inputs(batches[number])
        with method.counting(asked.head.encoder.model) as handle:
            answers = asked.head.logits(inputs).argmax(-1).tolist()
            report = handle.report()
        tokens = float(report.layers[-1].tokens_kept)
        yield None, {"answers": answers, "flops": report.flops, "tokens": tokens}

    def tell(count: int, total: int) -> None:
        on_progress(min(count * asked.size, len(images.files)), len(images.files))

    measure_cases(store, range(len(batches)), [None], measure, key, on_progress=tell)
    lines = [store.lines[store.key(key(number, None))] for number in range(len(batches))]
    classes = [answer for line in lines for answer in line["answers"]]
    means = (
        sum(line[name] * len(line["answers"]) for line in lines) / len(classes)
        for name in ("flops", "tokens")
    )
    return Answers(classes, *means)


def values_of(
    own: Answers, plain: Answers, labels: Sequence[int] | None = None
) -> dict[str, Value]:
    """Return the figures that follow from a row's answers, tokens and FLOPs.

    Args:
        own: the row's results.
        plain: the baseline's.
        labels: the class of each image, or None.
    """
    count = len(own.classes)
    values = {
        "flops": Value(mean=own.flops / 1e9, n=count),
        "tokens": Value(mean=own.tokens, n=count),
    }
    if own is not plain:
        same = sum(a == b for a, b in zip(own.classes, plain.classes, strict=True))
        values["agreement"] = Value(**wilson(same, count))
    if labels is not None:
        right, theirs = (
            [a == label for a, label in zip(one.classes, labels, strict=True)]
            for one in (own, plain)
        )
        p = None if own is plain else mcnemar_p(right, theirs)
        values["top1"] = replace(Value(**wilson(sum(right), count)), p=p)
    return values


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
        about: everything that timings depend on besides the methods, as JSON values.
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

    about = {**about, "methods": {name: method.config for name, method in methods.items()}}
    return timed_rounds(
        list(methods), rounds, call, record, about, warm_up=warm_up, on_progress=on_progress
    )


def table(result: Mapping[str, Any]) -> str:
    """Format the figures as a Markdown table; p is that of McNemar's test against unmerged."""
    lines = []
    for row in result["rows"]:
        values = row.get("values", {})
        cells = (_cell(values[name], name) if name in values else "" for name in COLUMNS)
        lines.append([row["label"], *cells])
    return markdown_table(["", *(head for head, *_ in COLUMNS.values())], lines)


def _cell(value: Mapping[str, Any], name: str) -> str:
    _, unit, digits = COLUMNS[name]
    text, low, high = f"{value['mean']:.{digits}f}{unit}", value["low"], value["high"]
    if low is not None and low != high:
        text += f" ({low:.{digits}f} to {high:.{digits}f})"
    return text + (f", p {value['p']:.3f}" if "p" in value else "")
