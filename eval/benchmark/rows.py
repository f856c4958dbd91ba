"""The rows of a benchmark: the unchanged model, merging, tomesd where it is installed, and rivals
that do nothing clever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.methods import Merging

from .. import tables
from ..results.schema import Family
from ..rivals.copied import Copied
from ..rivals.method import Rival
from ..rivals.plans import mean_attention, means, random_cells, random_keys, strided, todo
from ..rivals.toma import ToMA
from ..rivals.tomesd import NO_TOMESD, ToMeSD, has_tomesd


@dataclass(frozen=True, kw_only=True)
class Row(tables.Row):
    """One row of a benchmark; its family is baseline, tomesd, mame, rival, or floor: what a model
    must mind that can tell methods apart.

    Attributes:
        fewer: denoising steps that it takes less.
    """

    fewer: int = 0

    @property
    def config(self) -> dict[str, Any]:
        """Its settings as JSON values."""
        steps = {"fewer_steps": self.fewer} if self.fewer else {}
        return steps if self.method is None else self.method.describe()

    def on(self, model: LoadedModel) -> Row:
        """With the settings that merging takes on the model."""
        return (
            replace(self, method=self.method.on(model))
            if isinstance(self.method, Merging)
            else self
        )

    def sampling(self, settings: GenerateSettings) -> GenerateSettings:
        """The settings of its images."""
        return replace(settings, steps=max(1, settings.steps - self.fewer))

    @property
    def lacking(self) -> str | None:
        """Why this machine can't run it and what to do, or None."""
        return NO_TOMESD if isinstance(self.method, ToMeSD) and not has_tomesd() else None


BASELINE, DEFAULT, RIVAL, FLOOR = "baseline", "mame-default", "tomesd-50", "mean-attention"
FITTED = 128  # queries that the values of a rival's keys are fitted to
FEWER = "fewer-"  # with a number of steps after it
COUNTS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def _random(share: float, fit_queries: int = 0) -> Rival:
    if not 0 < share < 1:
        raise ValueError(f"{share:g} is not between 0 and 1")
    return Rival("random keys", random_keys, {"share": share}, fit_queries=fit_queries)


# Rows whose name ends in a share of the keys: label, family, method of the share.
AT_SHARE: dict[str, tuple[str, Any, Callable[[float], Any]]] = {
    "default-": (
        "MaMe, keep {} of the keys",
        "mame",
        lambda share: Merging(MaMeConfig(keep=share)),
    ),
    "unfitted-": (
        "MaMe, keep {} of the keys, not fitted",
        "mame",
        lambda share: Merging(MaMeConfig(keep=share, fit_queries=0)),
    ),
    "random-fitted-": (
        "{} of the keys at random, fitted",
        "rival",
        lambda share: _random(share, FITTED),
    ),
    "copied-": (
        "MLPs on {} of the tokens, the nearest copied",
        "rival",
        lambda share: Copied(MaMeConfig(mlp_keep=share)),
    ),
    "random-": ("{} of the keys at random", "rival", _random),
}


_CELLS: dict[str, Any] = {"cell": (2, 2)}
_NAMED: tuple[tuple[str, str, Family, Any], ...] = (
    (BASELINE, "baseline", "baseline", None),
    ("tomesd-25", "ToMeSD 25 %", "tomesd", ToMeSD(0.25)),
    (RIVAL, "ToMeSD 50 %", "tomesd", ToMeSD(0.5)),
    ("mame-0.7", "MaMe+MaRe τ 0.7", "mame", Merging(MaMeConfig(tau=0.7))),
    ("mame-0.8", "MaMe+MaRe τ 0.8", "mame", Merging(MaMeConfig(tau=0.8))),
    (DEFAULT, "MaMe default", "mame", Merging(MaMeConfig())),
    ("means-2x2", "means of 2 × 2 keys", "rival", Rival("means", means, _CELLS)),
    ("random-2x2", "one random key of 2 × 2", "rival", Rival("random", random_cells, _CELLS)),
    (
        "means-2x2-fitted",
        "means of 2 × 2 keys, fitted",
        "rival",
        Rival("means", means, _CELLS, fit_queries=FITTED),
    ),
    ("strided-1x2", "every second key", "rival", Rival("strided", strided, {"cell": (1, 2)})),
    ("todo-2", "ToDo, one key of 2 × 2", "rival", Rival("todo", todo, {"factor": 2})),
    ("toma-50", "ToMA 50 %", "rival", Rival("toma", ToMA, {"share": 0.5}, merge="qkv")),
    (FLOOR, "mean attention", "floor", Rival("mean attention", mean_attention, merge="qkv")),
)
# Every row with a name of its own: the paper's table, our default, what every merging has to beat,
# and attention that tells nothing of space.
ROWS = {
    name: Row(name=name, label=label, family=family, method=method, default=name == DEFAULT)
    for name, label, family, method in _NAMED
}
WHERE_NAMED = ("means-2x2-fitted", "strided-1x2", "todo-2", "toma-50")  # not by default


def own_row(text: str) -> Row:
    """Return the row of settings such as `keep=0.4,fit_queries=32`; that text is its name.

    Raises UserError for a text that gives no settings of `MaMeConfig`.
    """
    values: dict[str, Any] = {}
    try:
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            if not equals:
                raise ValueError(f"{part!r} has no value")
            values[name] = _value(value)
        config = MaMeConfig.from_dict(values)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"--row {text}: expected settings such as keep=0.4,fit_queries=32, but {error};"
            " correct it"
        ) from None
    return Row(name=text, label=text, family="mame", method=Merging(config))


def _value(text: str) -> Any:
    """Return the setting that a text gives: True, False, a number, or the text."""
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def chosen_rows(names: str | None, own: Sequence[str] = ()) -> list[Row]:
    """Return the rows of these names, with commas between, the baseline before them; for None the
    paper's, means, random keys and mean attention.

    Args:
        own: settings of further rows, see `own_row`.

    Raises UserError for an unknown name or setting.
    """
    further = [own_row(text) for text in dict.fromkeys(own)]
    return [*_named_rows(names), *further]


def _named_rows(names: str | None) -> list[Row]:
    known = dict(ROWS)
    if names is None:
        return [row for row in known.values() if row.name not in WHERE_NAMED]
    chosen = {BASELINE: known[BASELINE]}
    for name in tables.names_in(names) or [names]:
        row = known.get(name) or _numbered(name)
        if row is None:
            numbered = ", ".join([*(f"{head}0.5" for head in AT_SHARE), f"{FEWER}1"])
            raise UserError(
                f"--rows: expected names of {', '.join(known)}, {numbered}, got {name!r};"
                " correct it"
            )
        chosen[row.name] = row
    return list(chosen.values())


def _numbered(name: str) -> Row | None:
    """The row whose name ends in a number; None for names that don't begin like one."""
    head = next((head for head in (*AT_SHARE, FEWER) if name.startswith(head)), None)
    if head is None:
        return None
    number = name.removeprefix(head)
    if head == FEWER:
        if not number.isdecimal() or int(number) < 1:
            raise UserError(
                f"--rows {name}: expected how many steps fewer after {FEWER}, got {number!r};"
                " correct it"
            )
        count = int(number)
        number = COUNTS[count - 1] if count <= len(COUNTS) else str(count)
        label = f"{number} step{'s' * (count > 1)} fewer"
        return Row(name=f"{FEWER}{count}", label=label, fewer=count)
    label, family, method = AT_SHARE[head]
    try:
        share = float(number)
        made = method(share)
    except ValueError as error:
        raise UserError(
            f"--rows {name}: expected a share to keep after {head}: {error}; correct it"
        ) from None
    return Row(
        name=f"{head}{share:g}", label=label.format(f"{share:g}"), family=family, method=made
    )
