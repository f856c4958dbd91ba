"""Define the options of `mame-sd-eval classify`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mame_sd.errors import unexpected
from mame_sd.runs.files import check_folder
from mame_sd.runs.options import option

from .rows import SUITES


@dataclass(frozen=True, kw_only=True)
class ClassifySettings:
    """Set which images a vision transformer answers, and how its answers are measured."""

    suite: str = option("vit", f"One of {', '.join(SUITES)}.", metavar="NAME")
    out: Path | None = option(
        None, "Folder that keeps every answer. By default out/classify-SUITE.", metavar="DIR"
    )
    rows: str | None = option(
        None,
        "Rows to run instead of the suite's, such as mame-0.8, tome-8 or tome@mame-0.8.",
        metavar="NAMES",
    )
    data: Path | None = option(
        None,
        "Required. Folder of class folders as torchvision reads them, or of unlabelled images.",
        metavar="DIR",
    )
    num: int | None = option(None, "Use only NUM images, drawn with a fixed seed.", metavar="NUM")
    classes: Path | None = option(
        None,
        "Zero-shot: text file of class names, one per line, in the order of class folders.",
        metavar="FILE",
    )
    templates: Path | None = option(
        None, "Zero-shot: text file of prompts with {} for the name, a line each.", metavar="FILE"
    )
    batch_size: int = option(
        32, "Images in a batch. With tau, all keep as many tokens as the image that keeps most."
    )
    rounds: int = option(5, "Rounds of timing; each times every row once.")

    def __post_init__(self) -> None:
        if self.data is None:
            raise unexpected("--data", "a folder of class folders or of images", "none", "give one")
        check_folder("--data", self.data)
        limits = {"--num": self.num, "--batch-size": self.batch_size, "--rounds": self.rounds}
        for flag, value in limits.items():
            if value is not None and value < 1:
                raise unexpected(flag, "at least 1", value, "raise it")
