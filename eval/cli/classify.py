"""Run ``mame-sd-eval classify``: from options to a `Classification` and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mame_sd.cli.console import note
from mame_sd.errors import UserError
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.processes import this_process

from ..benchmark.results import check_out
from ..images import turned_note
from ..perception.answers import Asked
from ..perception.data import ImageSet, labelled, open_images
from ..perception.encoders import LoadedEncoder, load_encoder
from ..perception.heads import Head, class_names, prompt_templates, text_head
from ..perception.rows import Row
from ..perception.run import Classification
from ..results.schema import Results
from .benchmark import check_gates, stages
from .options import ClassifyOptions


def run_classify(
    options: ClassifyOptions,
    rows: list[Row],
    out: Path,
    choice: ModelChoice,
    command: str,
) -> Results:
    """Run rows on the images that the options name, and write the report.

    Args:
        options: the images, and how they are measured.
        rows: rows to run.
        out: folder of the results.
        choice: the model.
        command: command that makes the report again.

    Raises:
        UserError, MachineError: what was done before is kept, and the same call continues.
    """
    from ..report import render

    check_out(out)
    assert options.data is not None
    if this_process().count > 1:
        raise UserError("classify: expected one process, got several; start it alone")
    encoder = load_encoder(choice)
    images = open_images(options.data, options.num, encoder.frames)
    if said := turned_note(images.folder / name for name in images.files):
        note(said)
    head, images, about = _head(encoder, images, options)
    results = Classification(
        suite=options.suite,
        asked=Asked(head, images, options.batch_size),
        about=about,
        rows=rows,
        rounds=options.rounds,
        out=out,
        stage=stages(this_process()),
        command=command,
    ).run()
    render(results, out)
    check_gates(results, out)
    return results


def _head(
    encoder: LoadedEncoder, images: ImageSet, options: ClassifyOptions
) -> tuple[Head, ImageSet, dict[str, Any]]:
    """Return how the model answers, the images with its class numbers, and JSON values on both.

    Raises UserError if options or folders don't fit the model.
    """
    names, templates = options.classes, options.templates
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
