"""Define the groups of options that commands share: prompts, model, sampling, merging."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from mame_sd.cli.console import note
from mame_sd.cli.options import FieldOptions
from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError, unexpected
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.merging import settings_of
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.options import option
from mame_sd.runs.prompt_files import Prompt, load_prompts, prompts_from_texts


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Prompts of a file, then those of the command line; if `num` is given, the first `num`."""

    texts: tuple[str, ...] = option(
        (), "Prompts, each in quotes.", metavar="PROMPT", positional=True
    )
    file: str | None = option(
        None, "Prompt file: .txt, .csv, .tsv, or demo.", "--prompts", metavar="FILE"
    )
    num: int | None = option(None, "Use only the first NUM prompts.", metavar="NUM")

    def __post_init__(self) -> None:
        if self.num is not None and self.num < 1:
            raise unexpected("--num", "at least 1", self.num, "raise it, or leave it out for all")

    def or_demo(self) -> PromptOptions:
        """Return these, or the first 8 of the demo if no prompts are given."""
        if self.texts:
            return self
        return replace(self, file=self.file or "demo", num=8 if self.num is None else self.num)

    def read(self) -> list[Prompt]:
        """Return the prompts.

        Raises:
            UserError: there are none, or the file can't be used.
        """
        if self.file is None and not self.texts:
            raise UserError(
                'expected prompts, got none; give "a prompt" in quotes, or --prompts FILE (or demo)'
            )
        if len(self.texts) > 1 and not any(" " in text for text in self.texts):
            note(f"{len(self.texts)} prompts of one word each; a prompt of several needs quotes")
        from_file = [] if self.file is None else load_prompts(self.file)
        return [*from_file, *prompts_from_texts(self.texts)][: self.num]


def _setting(name: str) -> Any:
    """Declare an option of a field of MaMeConfig, with the help of that field."""
    (help,) = (f.metadata["help"] for f in fields(MaMeConfig) if f.name == name)
    return option(None, f"{help[:1].upper()}{help[1:]}.")


@dataclass(frozen=True, kw_only=True)
class MergingOptions:
    """The most common settings of merging; `config` takes all others."""

    baseline: bool = option(False, "Use the unchanged model, without merging.")
    keep: float | None = _setting("keep")
    mlp_keep: float | None = _setting("mlp_keep")
    block_keep: float | None = _setting("block_keep")
    tau: float | None = _setting("tau")
    min_tokens: int | None = _setting("min_tokens")
    config: str | None = option(
        None,
        "Any settings, such as fit_queries=32,redraw=false, or a .json file of them.",
        metavar="SETTINGS|FILE",
    )

    def read(self) -> MaMeConfig | None:
        """Return the settings, or None for the baseline.

        Raises:
            UserError: a value or file is wrong, or --baseline makes another option useless.
        """
        names = ("keep", "mlp_keep", "block_keep", "tau", "min_tokens")
        settings = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.baseline:
            others = [*settings, *(["config"] if self.config is not None else [])]
            if others:
                flags = ", ".join("--" + name.replace("_", "-") for name in others)
                raise UserError(
                    f"--baseline: expected no merging options next to it, got {flags}; drop one"
                )
            return None
        base = MaMeConfig() if self.config is None else settings_of(self.config, "--config")
        try:
            return base.replace(**settings)
        except ValueError as error:
            name, _, rest = str(error).partition(": ")
            where = "--" + name.replace("_", "-") if name in settings else f"merging: {name}"
            raise UserError(f"{where}: {rest}" if rest else f"merging: {error}") from None


PROMPTS = FieldOptions(PromptOptions)
MODEL = FieldOptions(ModelChoice, "Model")
SAMPLING = FieldOptions(GenerateSettings, "Sampling")
ONE_IMAGE = FieldOptions(GenerateSettings, "Sampling", ("batch_size", "images_per_prompt"))
MERGING = FieldOptions(MergingOptions, "Merging")
MERGED = FieldOptions(MergingOptions, "Merging", ("baseline",))
