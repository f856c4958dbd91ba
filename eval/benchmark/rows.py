"""The rows of a benchmark: the unchanged model, merging at any setting, and tomesd where it is installed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.methods import Merging

from .tomesd import NO_TOMESD, ToMeSD, has_tomesd


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a benchmark.

    Attributes:
        name: fit to be a folder's name.
        family: baseline, tomesd or mame.
        method: None: the unchanged model.
        default: what a user gets who changes no setting.
    """

    name: str
    label: str
    family: str
    method: Merging | ToMeSD | None = None
    default: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """Its settings as JSON values."""
        return {} if self.method is None else self.method.describe()

    @property
    def lacking(self) -> str | None:
        """Why this machine can't run it and what to do, or None."""
        return NO_TOMESD if isinstance(self.method, ToMeSD) and not has_tomesd() else None


def paper_rows() -> list[Row]:
    """The five rows of the paper's table, and our default."""
    rows = [Row(name="baseline", label="baseline", family="baseline")]
    for percent in (25, 50):
        method = ToMeSD(percent / 100)
        rows.append(Row(name=f"tomesd-{percent}", label=f"ToMeSD {percent} %", family="tomesd", method=method))
    for tau in (0.7, 0.8):
        merging = Merging(MaMeConfig(preset="plain", tau=tau))
        rows.append(Row(name=f"mame-{tau}", label=f"MaMe+MaRe τ {tau}", family="mame", method=merging))
    default = Merging(MaMeConfig())
    rows.append(Row(name="mame-default", label="MaMe default", family="mame", method=default, default=True))
    return rows


def chosen_rows(names: str | None) -> list[Row]:
    """The rows of these names, with commas between, the baseline always first; all for None.

    Raises UserError for an unknown name.
    """
    rows = paper_rows()
    if names is None:
        return rows
    chosen = [name.strip() for name in names.split(",")]
    known = [row.name for row in rows]
    for name in chosen:
        if name not in known:
            raise UserError(f"--rows: expected names of {', '.join(known)}, got {name!r}; correct it")
    return [row for row in rows if row.name in (known[0], *chosen)]
