"""Define the options of `mame-sd-eval caption`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mame_sd.errors import UserError
from mame_sd.runs.files import check_folder
from mame_sd.runs.options import option


@dataclass(frozen=True, kw_only=True)
class CaptionSettings:
    """The options of the command.

    Raises:
        UserError: an option is out of range; the message names it, its range and its value.
    """

    out: Path = option(Path("out/caption"), "Folder that keeps every caption.", metavar="DIR")
    data: Path | None = option(None, "Required. Folder of pictures.", metavar="FOLDER")
    references: Path | None = option(
        None, "Required. Captions of the pictures, in COCO's format.", metavar="FILE"
    )
    rows: str | None = option(
        None,
        "Rows to run besides the baseline, with commas between; an unknown one lists them.",
        metavar="NAMES",
    )
    num: int | None = option(None, "So many pictures.")
    tokens: int = option(48, "Tokens of a caption at most.")
    weights_dir: Path | None = option(
        None, "Folder with weights of metrics, looked into first.", metavar="DIR"
    )

    def __post_init__(self) -> None:
        for name, value in (("data", self.data), ("references", self.references)):
            if value is None:
                raise UserError(f"--{name}: expected a path, got none; give it")
        for name, count in (("num", self.num), ("tokens", self.tokens)):
            if count is not None and count < 1:
                raise UserError(f"--{name}: expected at least 1, got {count}; correct it")
        check_folder("--data", self.data)
