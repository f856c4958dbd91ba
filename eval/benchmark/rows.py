"""List the rows of a benchmark: the unmerged model, merging, tomesd, and simpler rivals."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mame_sd.config import MaMeConfig
from mame_sd.errors import unexpected
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.merging import Merging, settings_of

from .. import tables
from ..results.schema import Family

if TYPE_CHECKING:
    from mame_sd.runs.loading import LoadedModel


@dataclass(frozen=True, kw_only=True)
class Row(tables.Row):
    """One row of a benchmark.

    Attributes:
        family: family of rows that belong together. The floor is a change that is visible in the
            images of every useful model.
        default: True if it is what a user gets who changes no setting.
        fewer: number of denoising steps that it leaves out.
    """

    family: Family = "rival"
    default: bool = False
    fewer: int = 0

    @property
    def config(self) -> dict[str, Any]:
        """Return its settings as JSON values."""
        steps = {"fewer_steps": self.fewer} if self.fewer else {}
        return steps if self.method is None else self.method.describe()

    def on(self, model: LoadedModel) -> Row:
        """Return the row with the settings that merging takes on the model."""
        return (
            replace(self, method=self.method.on(model))
            if isinstance(self.method, Merging)
            else self
        )

    def sampling(self, settings: GenerateSettings) -> GenerateSettings:
        """Return the settings of its images."""
        return replace(settings, steps=max(1, settings.steps - self.fewer))

    @property
    def lacking(self) -> str | None:
        """Return why this machine can't run it and what to do, or None."""
        if self.family != "tomesd":
            return None
        from ..rivals import tomesd

        return None if tomesd.has_tomesd() else tomesd.NO_TOMESD


BASELINE, DEFAULT, RIVAL, FLOOR = "baseline", "mame-default", "tomesd-50", "mean-attention"
ONE_FEWER = "fewer-1"
# The rows of a benchmark without --rows: the default, what it has to beat, the paper's method, and
# attention without spatial information.
USUAL = f"{DEFAULT},{ONE_FEWER},copied-0.125,random-0.25,{RIVAL},toma-50,mame-0.8,{FLOOR}"
COUNTS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


# Rivals import torch, which has to wait until all names are checked.
def _rival(name: str, make: str, **given: Any) -> Any:
    from ..rivals import plans, toma
    from ..rivals.method import Rival

    return Rival(name, getattr(toma if make == "ToMA" else plans, make), **given)


def _tomesd(ratio: float) -> Any:
    from ..rivals.tomesd import ToMeSD

    return ToMeSD(ratio)


def _copied(share: float) -> Any:
    from ..rivals.copied import Copied

    return Copied(MaMeConfig(mlp_keep=share))


def _copied_frames() -> Any:
    from ..rivals.copied import Copied

    return Copied(MaMeConfig(keep=1, mlp_keep=0.5), frames=True)


def _merging(**fields: Any) -> Callable[[], Merging]:
    return lambda: Merging(MaMeConfig(**fields))


# Rows whose name ends in a share of the keys: label, family, method of the share.
AT_SHARE: dict[str, tuple[str, Family, Callable[[float], Any]]] = {
    "unfitted": (
        "MaMe, keep {} of the keys, not fitted",
        "mame",
        lambda share: Merging(MaMeConfig(keep=share, fit_queries=0)),
    ),
    "copied": ("MLPs on {} of the tokens, the nearest copied", "rival", _copied),
    "random": (
        "{} of the keys at random",
        "rival",
        lambda share: _rival("random keys", "random_keys", settings={"share": share}),
    ),
}
# Every row with a name of its own: its label, its family, and what makes its method.
NAMED: dict[str, tuple[str, Family, Callable[[], Any]]] = {
    BASELINE: ("baseline", "baseline", lambda: None),
    "tomesd-25": ("ToMeSD 25 %", "tomesd", partial(_tomesd, 0.25)),
    RIVAL: ("ToMeSD 50 %", "tomesd", partial(_tomesd, 0.5)),
    "mame-0.7": ("MaMe+MaRe τ 0.7", "mame", _merging(tau=0.7)),
    "mame-0.8": ("MaMe+MaRe τ 0.8", "mame", _merging(tau=0.8)),
    DEFAULT: ("MaMe default", "mame", _merging()),
    "second-frames": (
        "keys of every second frame",
        "rival",
        partial(_rival, "second frames", "second_frames", frames=True),
    ),
    "copied-frames": ("MLPs of every second frame, copied", "rival", _copied_frames),
    "todo-2": (
        "ToDo, one key of 2 × 2",
        "rival",
        partial(_rival, "todo", "todo", settings={"factor": 2}),
    ),
    "toma-50": (
        "ToMA 50 %",
        "rival",
        partial(_rival, "toma", "ToMA", settings={"share": 0.5}, merge="qkv"),
    ),
    FLOOR: (
        "mean attention",
        "floor",
        partial(_rival, "mean attention", "mean_attention", merge="qkv"),
    ),
}


def own_row(text: str) -> Row:
    """Return the row of settings such as `keep=0.4,fit_queries=32`, or of a .json file of them.

    The text is the row's label, and its name with `-` for each `/`.

    Raises UserError if the text or the file doesn't give settings of `MaMeConfig`.
    """
    name = re.sub(r"[/\\]", "-", text).lstrip("-.")
    return Row(name=name, label=text, family="mame", method=Merging(settings_of(text, "--row")))


def chosen_rows(names: str | None, own: Sequence[str] = ()) -> list[Row]:
    """Return the baseline and the rows that `names` lists, separated by commas.

    Args:
        names: names of rows. If None, those of `USUAL`.
        own: settings of further rows, see `own_row`.

    Raises:
        UserError: a name or a setting is unknown.
    """
    further = [own_row(text) for text in dict.fromkeys(own)]
    return [*(make() for make in _makers(names)), *further]


def check_rows(names: str | None, own: Sequence[str] = ()) -> None:
    """Raise UserError for an unknown name or setting, without importing any rival."""
    _makers(names)
    for text in own:
        own_row(text)


def row_named(name: str) -> Row:
    """Return the row of a name in `NAMED`."""
    label, family, make = NAMED[name]
    return Row(name=name, label=label, family=family, method=make(), default=name == DEFAULT)


def _makers(names: str | None) -> list[Callable[[], Row]]:
    names = USUAL if names is None else names
    makers: dict[str, Callable[[], Row]] = {BASELINE: partial(row_named, BASELINE)}
    for name in tables.names_in(names) or [names]:
        known, make = (name, partial(row_named, name)) if name in NAMED else _numbered(name)
        makers[known] = make
    return list(makers.values())


def _numbered(name: str) -> tuple[str, Callable[[], Row]]:
    """Return the normalised form of a name that ends in a number, and what makes its row.

    Raises:
        UserError: it is another name, or the number isn't allowed.
    """
    head, _, number = name.partition("-")
    if head == "fewer":
        if not number.isdecimal() or int(number) < 1:
            expected = "how many steps fewer after fewer-"
            raise unexpected(f"--rows {name}", expected, repr(number), "correct it")
        count = int(number)
        word = COUNTS[count - 1] if count <= len(COUNTS) else str(count)
        label, known = f"{word} step{'s' * (count > 1)} fewer", f"fewer-{count}"
        return known, partial(Row, name=known, label=label, fewer=count)
    if head not in AT_SHARE:
        numbered = ", ".join([*(f"{one}-0.5" for one in AT_SHARE), "fewer-1"])
        expected = f"names of {', '.join(NAMED)}, {numbered}"
        raise unexpected("--rows", expected, repr(name), "correct it")
    try:
        share = float(number)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        expected = f"a share to keep after {head}-, above 0 and below 1"
        raise unexpected(f"--rows {name}", expected, repr(number), "correct it")
    (label, family, method), known = AT_SHARE[head], f"{head}-{share:g}"
    label = label.format(f"{share:g}")
    return known, lambda: Row(name=known, label=label, family=family, method=method(share))
