"""The body of ``mame-sd-eval classify``: from options to a `Classification` and its report."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mame_sd.cli.console import note
from mame_sd.errors import UserError
from mame_sd.runs.files import shown
from mame_sd.runs.model_files import EMBEDDED, ModelChoice, digest_of
from mame_sd.runs.processes import joined, this_process

from ..benchmark.results import check_out
from ..images import turned_note
from ..networks.pretrained import SALIENCY
from ..perception.clips import open_clips
from ..perception.data import ImageSet, class_numbers, open_images
from ..perception.encoders import LoadedEncoder, load_encoder
from ..perception.forms import PLAIN, TrainedModels, find_models
from ..perception.heads import Head, class_names, prompt_templates, text_head
from ..perception.neighbours import load_saliency, nearest_head
from ..perception.rows import VIDEO, Row
from ..perception.run import Classification, Stage
from .benchmark import check_gates, stages
from .options import ClassifyOptions


def run_classify(
    options: ClassifyOptions,
    suite: str,
    rows: list[Row],
    out: Path,
    choice: ModelChoice,
    command: str,
) -> bool:
    """Run `rows` on the images that `options` name, into `out`, report included, which names the
    `command` that made it.

    Returns whether this is the main process, which has written it.

    Raises:
        UserError, MachineError: what was done before is kept; the same call continues.
    """
    from ..perception.trained import Trained
    from ..report import render

    check_out(out)
    models = models_of(options, suite, choice)
    if models is not None:
        choice = replace(choice, model=str(models.model(PLAIN, models.seeds[0])))
    if suite == VIDEO and choice.model is None:
        choice = replace(choice, model=f"{EMBEDDED}video")
    data = models.pictures if models is not None and options.data is None else options.data
    if data is None:
        raise UserError(
            "--data: expected a folder of class folders or of images, got none; give one"
        )
    process = this_process()
    load_model = load_saliency if choice.model == SALIENCY else load_encoder
    encoder = load_model(choice, process.local_rank)
    images = open_data(encoder, Path(data), options.num, suite)
    if process.is_main and (said := turned_note(images.folder / name for name in images.files)):
        note(said)
    head, images, numbers, about = make_head(encoder, images, options, stages(process))
    settings: dict[str, Any] = {
        "suite": suite,
        "head": head,
        "images": images,
        "numbers": numbers,
        "head_about": about,
        "rows": rows,
        "size": options.batch_size,
        "rounds": options.rounds,
        "out": out,
        "process": process,
        "stage": stages(process),
        "command": command,
    }
    with joined(process):
        if models is None:
            results = Classification(**settings).run()
        else:
            settings["head"] = replace(
                head, encoder=replace(encoder, identity=identity_of(models, encoder))
            )
            load = partial(load_head, models, choice, process.local_rank)
            results = Trained(**settings, models=models, load=load).run()
    if process.is_main:
        render(results, out)
        check_gates(results, out)
    return process.is_main


def open_data(encoder: LoadedEncoder, data: Path, num: int | None, suite: str) -> ImageSet:
    """The images in `data`, or clips where the model sees these.

    Raises UserError for a folder or a suite that does not fit the model.
    """
    if (encoder.frames is not None) != (suite == VIDEO):
        sees = "clips" if encoder.frames is not None else "images"
        raise UserError(
            f"--suite: expected {VIDEO} for a model of clips and another one for images, got"
            f" {suite} for {type(encoder.model).__name__}, which sees {sees}; change it"
        )
    if encoder.frames is not None:
        return open_clips(data, encoder.frames, num)
    return open_images(data, num)


def models_of(options: ClassifyOptions, suite: str, choice: ModelChoice) -> TrainedModels | None:
    """The models of the suite trained; None for another suite.

    Raises UserError for options that do not fit.
    """
    if suite != "trained":
        if options.trained is not None:
            raise UserError(
                f"--trained: expected it with --suite trained alone, got --suite {suite}; leave"
                " one out"
            )
        return None
    if options.trained is None:
        raise UserError(
            "--trained: expected the folder that scripts/training/train_vit.py trained in, got"
            " none; give it"
        )
    if choice.model is not None:
        raise UserError(
            f"--model {choice.model}: expected none beside --trained, whose models answer; leave"
            " it out"
        )
    return find_models(Path(options.trained))


def identity_of(models: TrainedModels, encoder: LoadedEncoder) -> dict[str, Any]:
    """JSON values that tell these models from others."""
    names = [(form, seed) for form in models.forms for seed in models.seeds]
    digests = {f"{form}-{seed}": digest_of(models.model(form, seed)) for form, seed in names}
    return {**encoder.identity, "name": shown(models.folder.resolve().name), "sha256": digests}


def load_head(
    models: TrainedModels, choice: ModelChoice, local_rank: int, form: str, seed: int
) -> Head:
    """The head of one trained model."""
    return Head(load_encoder(replace(choice, model=str(models.model(form, seed))), local_rank))


def make_head(
    encoder: LoadedEncoder, images: ImageSet, options: ClassifyOptions, stage: Stage
) -> tuple[Head, ImageSet, tuple[int, ...] | None, dict[str, Any]]:
    """How the model answers, the images that it is asked, its number of each class folder (None: no
    labels), and JSON values that say so.

    Raises UserError for options or folders that do not fit the model.
    """
    labelled = images.labels is not None
    if not encoder.compares_text:
        given = [
            flag
            for flag, value in (("--classes", options.classes), ("--templates", options.templates))
            if value
        ]
        if given:
            raise UserError(
                f"{given[0]}: expected none for {type(encoder.model).__name__}, which has no text"
                " half; leave it out"
            )
    if encoder.classifies:
        if not labelled:
            return Head(encoder), images, None, {"head": "the model's classifier", "labels": None}
        numbers, how = class_numbers(images, encoder.labels)
        return Head(encoder), images, numbers, {"head": "the model's classifier", "labels": how}
    own = tuple(range(len(images.classes))) if labelled else None
    if not encoder.compares_text:
        with stage("gallery: features") as on_progress:
            head, asked, about = nearest_head(encoder, images, options.batch_size, on_progress)
        return head, asked, own, about
    names = class_names(None if options.classes is None else Path(options.classes), images.classes)
    templates = prompt_templates(
        None if options.templates is None else Path(options.templates), encoder
    )
    about = {"head": "zero-shot", "classes": names, "templates": templates}
    return text_head(encoder, names, templates), images, own, about
