"""The groups of options that commands share: prompts, model, sampling, merging."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mame_sd.cli.options import FieldOptions, GivenOptions, flag_of, keyword
from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.options import option
from mame_sd.runs.prompt_files import Prompt, load_prompts, prompts_from_texts

# fields that go with tau alone
PAPERS = tuple(f.name for f in fields(MaMeConfig) if f.metadata.get("method") == "tokens")
RunFolderOption = Annotated[
    Path, typer.Option(help="Run folder: new, empty, or begun by the same command.", metavar="DIR")
]


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Which prompts: those of a file, then those of the command line, and the first `num` of them
    all.
    """

    file: str | None = option(
        None, "Prompt file: .txt, .csv, .tsv, .jsonl, or demo.", "--prompts", metavar="FILE"
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
        """These, or where none are given those of the demo."""
        return self if self.file is not None or self.texts else replace(self, file="demo")

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


class MergingOptions(GivenOptions):
    """One option for each field of MaMeConfig, and --config; `build` gives the config.

    A field whose plain name another option has is called --merge-<field>.
    """

    TAKEN = ("seed",)
    PANEL = "Merging"

    def __init__(self, without: Iterable[str] = ()) -> None:
        super().__init__(MaMeConfig, self.PANEL, without)

    def parameters(self) -> list[inspect.Parameter]:
        file = keyword(
            "config",
            Path,
            None,
            "JSON file of settings.",
            panel=self.PANEL,
            metavar="FILE",
        )
        return [*super().parameters(), file]

    def build(self, values: Mapping[str, Any]) -> Any:
        """The config. Raises UserError for a bad value or file."""
        base = MaMeConfig() if values["config"] is None else read_config(Path(values["config"]))
        try:
            return base.replace(**super().build(values))
        except (TypeError, ValueError) as error:
            raise UserError(f"merging: {error}") from None

    def flag(self, name: str) -> str:
        return flag_of(f"merge_{name}" if name in self.TAKEN else name)

    def help(self, f: Field[Any]) -> str:
        help = f.metadata["help"]
        return f"{help[:1].upper()}{help[1:]}."

    def given(self, values: Mapping[str, Any]) -> list[str]:
        """Flags of the options that were given."""
        names = [*(f.name for f in fields(MaMeConfig)), "config"]
        return [self.flag(name) for name in names if values.get(name) not in (None, [])]


def read_config(file: Path) -> MaMeConfig:
    """The settings of a file. Raises UserError, which names --config, for a bad one."""
    try:
        return MaMeConfig.from_file(file)
    except (TypeError, ValueError) as error:
        raise UserError(f"--config {error}") from None


class OptionalMerging(MergingOptions):
    """As `MergingOptions`, with --baseline: no merging at all, the config is None."""

    def parameters(self) -> list[inspect.Parameter]:
        baseline = keyword(
            "baseline", bool, False, "No merging: the unchanged model.", panel=self.PANEL
        )
        return [baseline, *super().parameters()]

    def build(self, values: Mapping[str, Any]) -> Any:
        if not values["baseline"]:
            return super().build(values)
        given = self.given(values)
        if given:
            raise UserError(
                f"--baseline: expected no merging options beside it, got {', '.join(given)}; drop"
                " one of them"
            )
        return None


PROMPTS = FieldOptions(PromptOptions)
MODEL = FieldOptions(ModelChoice, "Model")
SAMPLING = FieldOptions(GenerateSettings, "Sampling")
ONE_IMAGE = FieldOptions(GenerateSettings, "Sampling", without=("batch_size", "images_per_prompt"))
