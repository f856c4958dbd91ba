"""The body of ``mame-sd-eval classify``: from options to a `Classification` and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mame_sd.errors import UserError
from mame_sd.runs.encoders import LoadedEncoder, load_encoder
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.processes import joined, this_process

from ..benchmark.results import check_out
from ..perception.data import ImageSet, class_numbers, open_images
from ..perception.heads import Head, class_names, prompt_templates, text_head
from ..perception.rows import Row
from .benchmark import check_gates, check_rounds, stages
from .options import ClassifyOptions


def run_classify(
    options: ClassifyOptions, suite: str, rows: list[Row], out: Path, choice: ModelChoice, command: str
) -> bool:
    """Run `rows` on the images that `options` name, into `out`, report included, which names the `command` that made it.

    Returns whether this is the main process, which has written it.

    Raises:
        UserError, MachineError: what was done before is kept; the same call continues.
    """
    from ..perception.run import Classification
    from ..report import render

    check_rounds(options.rounds)
    check_out(out)
    if options.data is None:
        raise UserError("--data: expected a folder of class folders or of images, got none; give one")
    images = open_images(Path(options.data), options.num)
    process = this_process()
    encoder = load_encoder(choice, process.local_rank)
    head, numbers, about = make_head(encoder, images, options)
    with joined(process):
        results = Classification(
            suite=suite,
            head=head,
            images=images,
            numbers=numbers,
            head_about=about,
            rows=rows,
            size=options.batch_size,
            rounds=options.rounds,
            out=out,
            process=process,
            stage=stages(process),
            command=command,
        ).run()
    if process.is_main:
        render(results, out)
        check_gates(results, out)
    return process.is_main


def make_head(
    encoder: LoadedEncoder, images: ImageSet, options: ClassifyOptions
) -> tuple[Head, tuple[int, ...] | None, dict[str, Any]]:
    """How the model answers, its number of each class folder (None: no labels), and JSON values that say so.

    Raises UserError for a model that gives no answers, or options or folders that do not fit it.
    """
    labelled = images.labels is not None
    if encoder.classifies:
        given = [flag for flag, value in (("--classes", options.classes), ("--templates", options.templates)) if value]
        if given:
            raise UserError(
                f"{given[0]}: expected none for {type(encoder.model).__name__}, which has its own classes; leave it out"
            )
        if not labelled:
            return Head(encoder), None, {"head": "the model's classifier", "labels": None}
        numbers, how = class_numbers(images, encoder.labels)
        return Head(encoder), numbers, {"head": "the model's classifier", "labels": how}
    if not encoder.compares_text:
        raise UserError(
            f"--model: expected a model with a classifier or a text half, got {type(encoder.model).__name__}; give one of these"
        )
    names = class_names(None if options.classes is None else Path(options.classes), images.classes)
    templates = prompt_templates(None if options.templates is None else Path(options.templates), encoder)
    about = {"head": "zero-shot", "classes": names, "templates": templates}
    return text_head(encoder, names, templates), tuple(range(len(names))) if labelled else None, about
