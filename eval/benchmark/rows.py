"""The rows of a benchmark: the unchanged model, merging, tomesd where it is installed, and rivals
that do nothing clever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.methods import Merging

from .. import tables
from ..rivals.method import Rival
from ..rivals.plans import constant, means, random_cells, todo
from ..rivals.toma import ToMA
from .tomesd import NO_TOMESD, ToMeSD, has_tomesd


@dataclass(frozen=True, kw_only=True)
class Row(tables.Row):
    """One row of a benchmark; its family is baseline, tomesd, mame, rival, or floor: what a model
    must mind that can tell methods apart.
    """

    @property
    def config(self) -> dict[str, Any]:
        """Its settings as JSON values."""
        return {} if self.method is None else self.method.describe()

    def on(self, model: LoadedModel) -> Row:
        """With the settings that merging takes on the model."""
        return (
            replace(self, method=self.method.on(model))
            if isinstance(self.method, Merging)
            else self
        )

    @property
    def lacking(self) -> str | None:
        """Why this machine can't run it and what to do, or None."""
        return NO_TOMESD if isinstance(self.method, ToMeSD) and not has_tomesd() else None


BASELINE, RIVAL, FLOOR = "baseline", "tomesd-50", "mean-attention"
TOMA = {"share": 0.5, "side": 8, "temperature": 0.1, "choose_every": 10, "assign_every": 5}
RIVALS = {
    "means-2x2": ("means of 2 × 2 keys", Rival("means", means, settings={"cell": (2, 2)})),
    "random-2x2": (
        "one random key of 2 × 2",
        Rival("random", random_cells, settings={"cell": (2, 2), "redraw": True}),
    ),
    "todo-2": ("ToDo, every second key", Rival("todo", todo, settings={"factor": 2})),
    "toma-50": ("ToMA's form 50 %", Rival("toma", ToMA, "qkv", TOMA)),
}
SHARE = "default-"  # with a share of the keys to keep after it


def paper_rows() -> list[Row]:
    """The five rows of the paper's table, and our default."""
    rows = [Row(name=BASELINE, label="baseline", family="baseline")]
    for percent in (25, 50):
        method = ToMeSD(percent / 100)
        rows.append(
            Row(
                name=f"tomesd-{percent}",
                label=f"ToMeSD {percent} %",
                family="tomesd",
                method=method,
            )
        )
    for tau in (0.7, 0.8):
        merging = Merging(MaMeConfig(tau=tau))
        rows.append(
            Row(name=f"mame-{tau}", label=f"MaMe+MaRe τ {tau}", family="mame", method=merging)
        )
    default = Merging(MaMeConfig())
    rows.append(
        Row(name="mame-default", label="MaMe default", family="mame", method=default, default=True)
    )
    return rows


def rival_rows() -> list[Row]:
    """Those that every merging has to beat, published ones among them, and attention that tells
    nothing of space.
    """
    rows = [
        Row(name=name, label=label, family="rival", method=rival)
        for name, (label, rival) in RIVALS.items()
    ]
    none = Rival("mean attention", constant, "qkv", {"scale": 1.0})
    return [*rows, Row(name=FLOOR, label="mean attention", family="floor", method=none)]


def chosen_rows(names: str | None) -> list[Row]:
    """The rows of these names, with commas between, the baseline always first; for None the
    paper's, means, random keys and mean attention.

    Raises UserError for an unknown name.
    """
    known = {row.name: row for row in (*paper_rows(), *rival_rows())}
    if names is None:
        return [row for row in known.values() if row.name not in ("todo-2", "toma-50")]
    chosen = {BASELINE}
    for name in (name.strip() for name in names.split(",")):
        row = known.get(name) or (_at_share(name) if name.startswith(SHARE) else None)
        if row is None:
            raise UserError(
                f"--rows: expected names of {', '.join(known)}, {SHARE}0.5, got {name!r};"
                " correct it"
            )
        known[row.name] = row
        chosen.add(row.name)
    return [row for row in known.values() if row.name in chosen]


def _at_share(name: str) -> Row:
    try:
        merging = Merging(MaMeConfig(keep=float(name.removeprefix(SHARE))))
    except ValueError as error:
        raise UserError(
            f"--rows {name}: expected a share to keep after {SHARE}: {error}; correct it"
        ) from None
    keep = f"{merging.config.keep:g}"
    return Row(
        name=f"{SHARE}{keep}", label=f"MaMe, keep {keep} of the keys", family="mame", method=merging
    )
