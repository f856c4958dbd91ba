"""The groups of options that commands share: prompts, model, sampling, merging."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mame_sd.cli.options import FieldOptions, flag_of, keyword
from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.options import option
from mame_sd.runs.prompt_files import Prompt, load_prompts, prompts_from_texts

# fields that go with tau alone
TAU_FIELDS = tuple(f.name for f in fields(MaMeConfig) if f.metadata.get("method") == "tokens")


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Which prompts: those of a file, then those of the command line, and the first `num` of them
    all.
    """

    file: str | None = option(
        None, "Prompt file: .txt, .csv, .tsv, or demo.", "--prompts", metavar="FILE"
    )
    texts: tuple[str, ...] = option(
        (), "A prompt. Repeatable, also beside --prompts.", "--prompt", metavar="TEXT"
    )
    num: int | None = option(None, "Take the first NUM prompts only.", metavar="NUM")

    def __post_init__(self) -> None:
        if self.num is not None and self.num < 1:
            raise UserError(
                f"--num: expected at least 1, got {self.num}; raise it, or leave it out for all"
            )

    def or_demo(self) -> PromptOptions:
        """These, or where none are given the first 8 of the demo."""
        if self.texts:
            return self
        return replace(self, file=self.file or "demo", num=8 if self.num is None else self.num)

    def read(self) -> list[Prompt]:
        """The prompts.

        Raises UserError when there are none, or for a file that can't be used.
        """
        if self.file is None and not self.texts:
            raise UserError(
                "expected prompts, got none; give --prompts FILE (or demo), or --prompt TEXT"
            )
        from_file = [] if self.file is None else load_prompts(self.file)
        return [*from_file, *prompts_from_texts(self.texts)][: self.num]


class MergingOptions(FieldOptions):
    """One option for each field of MaMeConfig, and --config; `build` gives the config.

    A field whose plain name another option has is called --merge-<field>. With `baseline` there is
    --baseline, too: no merging at all, the config is None.
    """

    TAKEN = ("seed",)

    def __init__(self, without: Iterable[str] = (), baseline: bool = False) -> None:
        super().__init__(MaMeConfig, "Merging", without, otherwise="")
        self._baseline = baseline

    def parameters(self) -> list[inspect.Parameter]:
        panel = self._panel
        file = keyword("config", Path, None, "JSON file of settings.", panel=panel, metavar="FILE")
        found = [*super().parameters(), file]
        if self._baseline:
            said = "No merging: the unchanged model."
            found.insert(0, keyword("baseline", bool, False, said, panel=panel))
        return found

    def build(self, values: Mapping[str, Any]) -> Any:
        """The config. Raises UserError for a bad value or file, or for options that --baseline
        leaves no use.
        """
        if values.get("baseline"):
            others = {name: value for name, value in values.items() if name != "baseline"}
            given = [self.flag(name) for name, value in others.items() if value not in (None, [])]
            if given:
                raise UserError(
                    f"--baseline: expected no merging options beside it, got {', '.join(given)};"
                    " drop one of them"
                )
            return None
        file = values["config"]
        try:
            base = MaMeConfig() if file is None else MaMeConfig.from_file(file)
        except (TypeError, ValueError) as error:
            raise UserError(f"--config {error}") from None
        try:
            return base.replace(**super().build(values))
        except (TypeError, ValueError) as error:
            name, _, rest = str(error).partition(": ")
            if name in (f.name for f in self._fields):
                raise UserError(f"{self.flag(name)}: {rest}") from None
            raise UserError(f"merging: {error}") from None

    def flag(self, name: str) -> str:
        return flag_of(f"merge_{name}" if name in self.TAKEN else name)


PROMPTS = FieldOptions(PromptOptions)
MODEL = FieldOptions(ModelChoice, "Model")
SAMPLING = FieldOptions(GenerateSettings, "Sampling")
ONE_IMAGE = FieldOptions(GenerateSettings, "Sampling", without=("batch_size", "images_per_prompt"))
