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
from mame_sd.runs.generate import Summary, generate, given_settings
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.loading import LoadedModel, load_model
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.processes import joined, this_process
from mame_sd.runs.prompt_files import prompt_file_identity
from mame_sd.runs.run_folder import RunFolder


def run_generate(
    out: Path,
    prompts: PromptOptions,
    choice: ModelChoice,
    settings: GenerateSettings,
    config: MaMeConfig | None,
) -> None:
    """Load the model, make what `out` lacks, and print how it went."""
    chosen = prompts.read()
    prompt_file = None if prompts.file is None else prompt_file_identity(prompts.file)
    RunFolder(out).check(given_settings(chosen, settings, config))
    process = this_process()
    with doing(f"loading {choice.model or 'the embedded model'}", process.is_main):
        model = load_model(choice, process.local_rank)
    on_note = note if process.is_main else lambda text: None
    if cut := cut_prompts(model.pipe, [prompt.text for prompt in chosen]):
        on_note(
            f"{len(cut)} of {counted(len(chosen), 'prompt')} {'is' if len(cut) == 1 else 'are'}"
            f" longer than the model reads and cut ({chosen[cut[0]].id} first)"
        )
    if config is not None:
        merging, saved = settings_in_force(model, config, on_note), model.saved_merging
        config = model.resolved(merging) if saved is None or saved.on or config.given else None
    with joined(process), progress("images", process.is_main) as on_progress:
        summary = generate(
            model,
            chosen,
            settings,
            config,
            out,
            prompt_file=prompt_file,
            process=process,
            on_progress=on_progress,
            on_step=on_progress.step,
            on_note=note,
        )
    if process.is_main:
        print(_outcome(summary, out))
        for level in summary.levels:
            kept, count = level["tokens_kept"], level["tokens_in"]
            of = f"{kept:.0f} of {count:.0f} {merged_things(config)} kept"
            print(f"level {level['level']}: {of} ({kept / count:.0%})")


def merged_things(config: MaMeConfig | None) -> str:
    """What merges: "keys" (with their values) or whole "tokens"."""
    return "tokens" if config is None else config.method


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
