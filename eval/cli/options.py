"""Option groups of ``mame-sd-eval`` beside those of ``mame-sd``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mame_sd.cli.groups import MergingOptions
from mame_sd.cli.options import FieldOptions, GivenOptions, keyword
from mame_sd.errors import UserError
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.model_files import DTYPES, ModelChoice
from mame_sd.runs.options import option

from ..metric_list import FID_BACKENDS

METHODS = ("baseline", "mame", "tomesd")
CLASSIFY_SUITES = ("vit", "zero-shot", "ablation", "trained", "video")  # of `perception.rows`
DEFAULT_RATIO = 0.5
CLIP_HELP = "CLIP to score with: a folder, clip-vit-b-32, clip-vit-l-14 or embedded-clip."
# The options of a ModelChoice that count for a vision transformer.
ENCODER = FieldOptions(
    ModelChoice,
    "Model",
    without=("scheduler", "loras", "variant", "single_file_config"),
    help={"model": "Folder or hub id of a vision transformer to load. Default: embedded-clip."},
)
SUITE_SAMPLING = GivenOptions(
    GenerateSettings,
    "Sampling",
    without=("negative_prompt", "images_per_prompt"),
    otherwise="the suite's",
)


class MethodOptions(MergingOptions):
    """--method, --ratio and merging's options.

    `build` gives what `mame_sd.runs.generate.generate` takes.
    """

    def parameters(self) -> list[inspect.Parameter]:
        method = "What to run: the unchanged model, merging, or tomesd (extra rivals)."
        ratio = f"Share of tokens that tomesd merges. Without it, {DEFAULT_RATIO}."
        return [
            keyword("method", str, "mame", method, panel="Method", metavar="|".join(METHODS)),
            keyword("ratio", float, None, ratio, panel="Method"),
            *super().parameters(),
        ]

    def build(self, values: Mapping[str, Any]) -> Any:
        """None for the baseline, a MaMeConfig, or tomesd.

        Raises UserError for options that do not fit the method.
        """
        method, ratio = values["method"], values["ratio"]
        if method not in METHODS:
            raise UserError(
                f"--method: expected one of {', '.join(METHODS)}, got {method!r}; give one of these"
            )
        unused = [] if method == "mame" else self.given(values)
        unused += ["--ratio"] if ratio is not None and method != "tomesd" else []
        if unused:
            raise UserError(
                f"--method {method}: expected no {', '.join(unused)} beside it; drop one of them"
            )
        if method == "tomesd":
            from ..benchmark.tomesd import ToMeSD

            return ToMeSD(DEFAULT_RATIO if ratio is None else ratio)
        return super().build(values) if method == "mame" else None


@dataclass(frozen=True, kw_only=True)
class ScoringOptions:
    """What metrics are computed with."""

    weights_dir: str | None = option(
        None, "Folder with weights of metrics, looked into first.", metavar="DIR"
    )
    offline: bool = option(False, "Never ask a network.")
    clip: str | None = option(None, CLIP_HELP, metavar="NAME|DIR")
    fid_backend: str = option(
        FID_BACKENDS[0],
        "Whose code computes FID: mame-sd, or the package clean-fid (extra clean-fid).",
        metavar="|".join(FID_BACKENDS),
    )
    device: str = option("auto", "cpu, cuda, cuda:N, mps, or auto: the fastest there is.")


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Which language model and texts caches are measured on."""

    model: str = option(
        "smollm2", "smollm2 (98 MB from PyPI), or a folder or name that transformers loads."
    )
    texts: str | None = option(
        None,
        "Folder of HTML, Python or plain text. Without it, Python's own.",
        metavar="DIR",
    )
    half: str = option("report", "Which half of the files: report, or development to tune on.")
    num: int = option(40, "Passages of text; 0: none.")
    prompts: int = option(40, "Prompts of each task.")
    length: int = option(1024, "Tokens of a prompt.")
    rest: int = option(128, "Tokens that follow it, on which methods are compared.")
    shares: str = option("0.25,0.125", "Shares of the cache, with commas between.")
    tasks: str = option(
        "", "Retrieval tasks, with commas between: needles, pairs.", metavar="NAMES"
    )
    device: str = option("auto", "cpu, cuda, cuda:N, mps, or auto: the fastest there is.")
    dtype: str = option(
        "float32", "Number format of the model.", metavar="|".join(("auto", *DTYPES))
    )
    revision: str | None = option(None, "Revision of a hub id.")
    weights_dir: str | None = option(None, "Folder with weights, looked into first.", metavar="DIR")
    offline: bool = option(False, "Never ask a network.")


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions:
    """What a vision transformer answers, and how it is measured."""

    data: str | None = option(
        None,
        "Folder of class folders as torchvision reads them, or of images without labels.",
        metavar="DIR",
    )
    trained: str | None = option(
        None,
        "Suite trained: folder of scripts/training/train_vit.py, with its models and pictures.",
        metavar="DIR",
    )
    num: int | None = option(None, "Take NUM images only, drawn once and for all.", metavar="NUM")
    classes: str | None = option(
        None,
        "Zero-shot: text file of class names, one a line, by sorted class folder.",
        metavar="FILE",
    )
    templates: str | None = option(
        None, "Zero-shot: text file of prompts with {} for the name, a line each.", metavar="FILE"
    )
    batch_size: int = option(
        32, "Images in a batch; by tau, all keep as many tokens as the one that keeps most."
    )
    rounds: int = option(5, "Rounds of timing; each times every row once.")

    def __post_init__(self) -> None:
        for flag, value in (("--num", self.num), ("--batch-size", self.batch_size)):
            if value is not None and value < 1:
                raise UserError(f"{flag}: expected at least 1, got {value}; raise it")
