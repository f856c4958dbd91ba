"""Define the options of `mame-sd-eval cache`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mame_sd.errors import UserError
from mame_sd.runs.files import check_folder
from mame_sd.runs.options import option

HALVES = ("development", "report")


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """The options of the command.

    Raises:
        UserError: an option is out of range; the message names it, its range and its value.
    """

    out: Path = option(Path("out/cache"), "Folder for results.jsonl.", metavar="DIR")
    texts: Path | None = option(
        None, "Folder of Python or plain text. Without it, Python's own.", metavar="DIR"
    )
    half: str = option("report", "Which half of the files: report, or development to tune on.")
    num: int = option(40, "Passages of text.")
    length: int = option(1024, "Tokens of a prompt.")
    rest: int = option(128, "Tokens that follow it, on which methods are compared.")
    shares: str = option("0.25,0.125", "Shares of the cache, with commas between.")
    rows: str | None = option(
        None, "Methods, with commas between. Without it, all.", metavar="NAMES"
    )
    weights_dir: Path | None = option(
        None, "Folder with weights, looked into first.", metavar="DIR"
    )

    def __post_init__(self) -> None:
        check_folder("--texts", self.texts)
        check_folder("--weights-dir", self.weights_dir)
        limits = (("num", 1), ("length", 64), ("rest", 2))
        for name, least in limits:
            value = getattr(self, name)
            if value < least:
                raise UserError(f"--{name}: expected at least {least}, got {value}; raise it")
        if self.half not in HALVES:
            raise UserError(f"--half: expected {' or '.join(HALVES)}, got {self.half!r}; give one")
        for share in self.kept:
            if not 0 < share < 1:
                raise UserError(
                    f"--shares: expected shares above 0 and below 1, got {share}; correct it"
                )

    @property
    def kept(self) -> tuple[float, ...]:
        """Return the shares of the cache that stay."""
        try:
            return tuple(float(part) for part in self.shares.split(","))
        except ValueError:
            raise UserError(
                f"--shares: expected numbers with commas between, got {self.shares!r}; correct it"
            ) from None
