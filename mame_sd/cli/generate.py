"""The body of ``generate``, and the settings that a command merges with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mame_sd.cli.console import doing, note, progress
from mame_sd.cli.groups import PromptOptions
from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.report import counted
from mame_sd.runs.generate import Summary, generate
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.loading import LoadedModel, load_model
from mame_sd.runs.methods import Method
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.processes import joined, this_process
from mame_sd.runs.prompt_files import Prompt, prompt_file_identity
from mame_sd.runs.run_folder import RunFolder


def run_generate(
    out: Path,
    prompts: PromptOptions,
    choice: ModelChoice,
    settings: GenerateSettings,
    method: MaMeConfig | Method | None,
) -> None:
    """Load the model, make what `out` lacks, and print how it went."""
    chosen = prompts.read()
    prompt_file = None if prompts.file is None else prompt_file_identity(prompts.file)
    RunFolder(out).check()
    process = this_process()
    with doing(f"loading {choice.model or 'the embedded model'}", process.is_main):
        model = load_model(choice, process.local_rank)
    on_note = note if process.is_main else lambda text: None
    note_cut(model.pipe, chosen, on_note)
    if isinstance(method, MaMeConfig):
        merging = settings_in_force(model, method, on_note)
        saved = model.saved_merging
        method = model.resolved(merging) if saved is None or saved.on or method.given else None
    with joined(process), progress("images", process.is_main) as on_progress:
        summary = generate(
            model,
            chosen,
            settings,
            method,
            out,
            prompt_file=prompt_file,
            process=process,
            on_progress=on_progress,
            on_step=on_progress.step,
            on_note=note,
        )
    if process.is_main:
        print(_outcome(summary, out))
        _print_levels(summary.levels, method)


def note_cut(pipe: Any, prompts: Sequence[Prompt], on_note: Callable[[str], None] = note) -> None:
    """Says how many prompts the model reads only in part."""
    cut = cut_prompts(pipe, [prompt.text for prompt in prompts])
    if cut:
        on_note(
            f"{len(cut)} of {counted(len(prompts), 'prompt')} {'is' if len(cut) == 1 else 'are'}"
            f" longer than the model reads and cut ({prompts[cut[0]].id} first)"
        )


def cut_prompts(pipe: Any, texts: Sequence[str]) -> list[int]:
    """The places of the prompts that the model's longest text encoder reads only in part."""
    tokenizers = [
        part
        for name, part in pipe.components.items()
        if name.startswith("tokenizer") and part is not None
    ]
    longest = max(tokenizers, key=lambda tokenizer: tokenizer.model_max_length, default=None)
    if longest is None or longest.model_max_length > 1000:
        return []
    ids = longest(list(texts), verbose=False)["input_ids"]
    return [place for place, found in enumerate(ids) if len(found) > longest.model_max_length]


def load_to_merge(
    choice: ModelChoice, given: MaMeConfig, prompt: str | None = None
) -> tuple[LoadedModel, MaMeConfig]:
    """The model and the settings to merge it with.

    Notes when the model reads only a part of `prompt`.
    """
    with doing(f"loading {choice.model or 'the embedded model'}"):
        model = load_model(choice)
    if prompt is not None and cut_prompts(model.pipe, [prompt]):
        note("the prompt is longer than the model reads and is cut")
    return model, settings_in_force(model, given)


def settings_in_force(
    model: LoadedModel, given: MaMeConfig, on_note: Callable[[str], None] = note
) -> MaMeConfig:
    """The merging saved with the model, where there is some, under the fields of `given`; `given`
    itself elsewhere.

    Raises UserError where the two do not go together.
    """
    saved = model.saved_merging
    if saved is None:
        return given
    on_note(
        f"merging as saved with the model ({saved}); options such as --tau, --keep and --baseline"
        " override it"
    )
    try:
        return saved.overridden(given)
    except ValueError as error:
        raise UserError(f"merging: {error} (the model was saved with {saved})") from None


def _outcome(summary: Summary, out: Path) -> str:
    """One line: how many images there are, how many of them were there before, and their time."""
    count = counted(summary.images, "image")
    seconds = summary.seconds_per_image
    took = "" if seconds is None else f", {seconds:.2f} s per image"
    if summary.found == summary.images:
        return f"nothing to do: {count} in {out} already{took} when made"
    before = f" ({summary.found} of them there already)" if summary.found else ""
    return f"{count} in {out}{before}{took}"


def _print_levels(levels: Sequence[dict[str, Any]], method: MaMeConfig | Method | None) -> None:
    what = "keys" if isinstance(method, MaMeConfig) and method.method == "keys" else "tokens"
    for level in levels:
        kept, count = level["tokens_kept"], level["tokens_in"]
        print(f"level {level['level']}: {kept:.0f} of {count:.0f} {what} kept ({kept / count:.0%})")
