"""What `mame-sd-eval caption` measures, and on which pictures."""

from __future__ import annotations

from dataclasses import dataclass

from mame_sd.errors import UserError
from mame_sd.runs.options import option


@dataclass(frozen=True, kw_only=True)
class CaptionSettings:
    """The options of the command.

    Raises:
        UserError: naming the option, its range and the value that came.
    """

    data: str | None = option(None, "Folder of pictures.", metavar="FOLDER")
    references: str | None = option(
        None, "Captions of the pictures, in COCO's format.", metavar="FILE"
    )
    rows: str | None = option(
        None,
        "Rows to run beside the baseline, with commas between; an unknown one lists them.",
        metavar="NAMES",
    )
    num: int | None = option(None, "So many pictures.")
    prompt: str | None = option(None, "What is asked, with <image> in it.", metavar="TEXT")
    tokens: int = option(48, "Tokens of a caption at most.")
    longer: int = option(0, "Tokens of a caption at least.")
    weights_dir: str | None = option(
        None, "Folder with weights of metrics, looked into first.", metavar="DIR"
    )

    def __post_init__(self) -> None:
        for name, value in (("data", self.data), ("references", self.references)):
            if value is None:
                raise UserError(f"--{name}: expected a path, got none; give it")
        if self.num is not None and self.num < 1:
            raise UserError(f"--num: expected at least 1, got {self.num}; correct it")
        if self.tokens < 1 or not 0 <= self.longer <= self.tokens:
            raise UserError(
                "--tokens, --longer: expected 1 or more, and from 0 to as many, got"
                f" {self.tokens} and {self.longer}; correct them"
            )
