"""Run ``mame-sd generate``, and load models with the settings that commands merge with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diffusers.utils import logging

from mame_sd.cli.console import OUTPUT, answer, doing, note, progress
from mame_sd.config import MaMeConfig
from mame_sd.diffusion.report import NAMES
from mame_sd.diffusion.saved_setting import ENTRY
from mame_sd.report import counted
from mame_sd.runs.generate import Summary, generate
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.loading import LoadedModel, load_model
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.processes import Process, joined, this_process
from mame_sd.runs.prompt_files import Prompt


def run_generate(
    out: Path,
    prompts: Sequence[Prompt],
    choice: ModelChoice,
    settings: GenerateSettings,
    config: MaMeConfig | None,
) -> None:
    """Load the model, make the images that `out` lacks, and print a summary.

    Args:
        out: folder of the run.
        prompts: the prompts.
        choice: the model.
        settings: how images are sampled.
        config: how it merges; None for the unmerged model.
    """
    process = this_process()
    model = load(choice, process)
    config = None if config is None else model.resolved(config)
    with joined(process), progress("images", process.is_main) as on_progress:
        summary = generate(
            model,
            prompts,
            settings,
            config,
            out,
            process=process,
            on_progress=on_progress,
            on_step=on_progress.step,
        )
    if not process.is_main:
        return
    lines = [_outcome(summary, out)]
    merged = [level for level in summary.levels if level["merged"]]
    for level in merged:
        line = level_line(level, "keys" if config is None else config.method)
        lines.append(f"{line} ({level['share']:.0%})")
    if summary.levels and not merged:
        largest = max(level["tokens_in"] for level in summary.levels)
        lines.append(
            "no layer merged, which is the fastest way here by default; --min-tokens"
            f" {largest:.0f} merges the largest layers anyway"
        )
    answer("\n".join(lines), {"out": str(out), **asdict(summary)})


def level_line(level: Mapping[str, Any], method: str) -> str:
    """Return what merged at a level, or how many tokens were computed.

    >>> level_line({"level": 0, "tokens_in": 64.0, "tokens_kept": 16.0}, "keys")
    'level 0: 16 of 64 keys kept'
    >>> level_line({"kind": "mlp", "level": 0, "tokens_in": 64.0, "tokens_kept": 8.0}, "keys")
    'MLPs, level 0: 8 of 64 tokens'
    """
    kind = level.get("kind") or "attention"
    what = f"{method} kept" if kind == "attention" else "tokens"
    kept = f"{level['tokens_kept']:.0f} of {level['tokens_in']:.0f}"
    return f"{NAMES[kind]}level {level['level']}: {kept} {what}"


def load(choice: ModelChoice, process: Process | None = None) -> LoadedModel:
    """Load a model. From then on diffusers says which words of a prompt the model doesn't read."""
    process = process or Process()
    with doing(f"loading {choice.model or 'the embedded model'}", process.is_main):
        model = load_model(choice, process.local_rank)
    if process.is_main and not OUTPUT.get().quiet:
        logging.set_verbosity_warning()
    folder = model.pipe.config.get("_name_or_path")  # none of a single file
    index = Path(folder or os.devnull) / "model_index.json"
    if process.is_main and index.is_file() and ENTRY in json.loads(index.read_text("utf-8")):
        note(
            "StableDiffusionMaMePipeline saved its setting with this model, which commands don't"
            " read: give options, or a file mame.json in the folder"
        )
    return model


def _outcome(summary: Summary, out: Path) -> str:
    """Return one line: how many images there are, how many are new, and their seconds."""
    count = counted(summary.images, "image")
    seconds = summary.seconds_per_image
    took = "" if seconds is None else f", {seconds:.2f} s per image"
    if summary.found == summary.images:
        return f"nothing to do: {count} in {out} already{took} when made"
    before = f" ({summary.found} of them there already)" if summary.found else ""
    return f"{count} in {out}{before}{took}"
