"""Define the groups of options that ``mame-sd-eval`` has in addition to those of ``mame-sd``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mame_sd.cli.options import FieldOptions
from mame_sd.errors import unexpected
from mame_sd.runs.files import check_folder
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.options import option

from ..benchmark.suites import README, SUITES
from ..metric_list import FID_BACKENDS

WEIGHTS_HELP = "Folder with weights of metrics, searched first."


# Fields of ModelChoice that a pretrained transformer has no use for.
_WITHOUT = ("scheduler", "loras", "variant", "single_file_config")

_ENCODERS = "Folder, hub id or name of timm of a vision transformer. Default: embedded-clip."
_LLAVAS = "Folder or hub id of a LLaVA. Default: embedded-captioner."
ENCODER = FieldOptions(ModelChoice, "Model", _WITHOUT, help={"model": _ENCODERS})
CAPTIONER = FieldOptions(ModelChoice, "Model", _WITHOUT, help={"model": _LLAVAS})
LANGUAGE_MODEL = FieldOptions(
    ModelChoice,
    "Model",
    _WITHOUT,
    {"model": "smollm2", "dtype": "float32"},
    {"model": "smollm2 (98 MB from PyPI), or a folder or name that transformers loads."},
)
SUITE_SAMPLING = FieldOptions(
    GenerateSettings,
    "Sampling, instead of the suite's",
    ("negative_prompt", "images_per_prompt"),
    given_only=True,
)


@dataclass(frozen=True, kw_only=True)
class MetricOptions:
    """Inputs of metrics."""

    reference: Path | None = option(
        None,
        "Folder of images to measure quality against.",
        metavar="DIR",
    )
    weights_dir: Path | None = option(None, WEIGHTS_HELP, metavar="DIR")
    clip: str | None = option(
        None,
        "CLIP to score with: a folder, clip-vit-b-32, clip-vit-l-14 or embedded-clip.",
        metavar="NAME|DIR",
    )

    def __post_init__(self) -> None:
        check_folder("--weights-dir", self.weights_dir)
        check_folder("--reference", self.reference)


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(MetricOptions):
    """What a benchmark of generation compares, and with what."""

    suite: str = option("quick", f"One of {', '.join((*SUITES, README))}.", metavar="NAME")
    out: Path | None = option(
        None,
        "Folder: new, empty, or begun by the same command. By default out/SUITE.",
        metavar="DIR",
    )
    rows: str | None = option(
        None,
        "Rows to run next to the baseline, separated by commas; an unknown name lists all.",
        metavar="NAMES",
    )
    row: tuple[str, ...] = option(
        (),
        "A row of your own settings, such as keep=0.4,fit_queries=32, or a .json file. Repeatable.",
        "--row",
        metavar="SETTINGS",
    )
    rounds: int | None = option(None, "Rounds of timing, instead of the suite's.")
    case: str | None = option(
        None, "With --suite readme: the only case to measure, such as video.", metavar="NAME"
    )
    held_out: bool = option(False, "Draw prompts other than those on which defaults were chosen.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounds is not None and self.rounds < 1:
            raise unexpected("--rounds", "at least 1", self.rounds, "raise it")


@dataclass(frozen=True, kw_only=True)
class ScoringOptions(MetricOptions):
    """What is scored, and by what."""

    metrics: str = option(
        "psnr,ssim",
        "Metrics, separated by commas; an unknown name lists all.",
        metavar="NAMES",
    )
    offline: bool = option(False, "Never use the network.")
    fid_backend: str = option(
        FID_BACKENDS[0],
        "Whose code computes FID: mame-sd, or the package clean-fid (extra clean-fid).",
        metavar="|".join(FID_BACKENDS),
    )
    device: str = option("auto", "cpu, cuda, cuda:N, mps, or auto: the fastest available.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fid_backend not in FID_BACKENDS:
            allowed = " or ".join(FID_BACKENDS)
            raise unexpected("--fid-backend", allowed, repr(self.fid_backend), "give one of these")
