"""Run ``mame-sd generate``, and load models with the settings that commands merge with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mame_sd.cli.console import answer, doing, note, progress
from mame_sd.config import MaMeConfig
from mame_sd.report import NAMES, counted
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
    model = load_with_note(choice, prompts, process)
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


def cut_prompts(pipe: Any, texts: Sequence[str]) -> list[int]:
    """Return the indices of the prompts that the longest text encoder reads only in part."""
    tokenizers = [
        part
        for name, part in pipe.components.items()
        if name.startswith("tokenizer") and hasattr(part, "model_max_length")
    ]
    if not tokenizers:
        return []
    longest = max(tokenizers, key=lambda tokenizer: tokenizer.model_max_length)
    ids = longest(list(texts), verbose=False)["input_ids"]
    return [index for index, found in enumerate(ids) if len(found) > longest.model_max_length]


def load_with_note(
    choice: ModelChoice, prompts: Sequence[Prompt], process: Process | None = None
) -> LoadedModel:
    """Load a model, and print a note on prompts that it reads only in part.

    Args:
        choice: the model.
        prompts: the prompts.
        process: this process. Only the main one prints.
    """
    process = process or Process()
    with doing(f"loading {choice.model or 'the embedded model'}", process.is_main):
        model = load_model(choice, process.local_rank)
    cut = cut_prompts(model.pipe, [prompt.text for prompt in prompts])
    if cut and process.is_main:
        note(
            f"{len(cut)} of {counted(len(prompts), 'prompt')} {'is' if len(cut) == 1 else 'are'}"
            f" longer than the model reads, which ignores the rest ({prompts[cut[0]].id} first)"
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
