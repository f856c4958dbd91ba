"""List the rows of `classify`: names that say what runs, and suites of them.

docs/perception-classify.md says what each name means. `mame-0.8-unrefined` and names like it are
the paper's ablations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from mame_sd.errors import UserError

from .. import tables
from .methods import BLOCKS, RIVALS, Method, merged

BASELINE = "baseline"
DEFAULT = "mame-default"
PLACES: dict[str, Any] = {**{name: name for name in BLOCKS}, "last": (-1,)}
ABLATED: dict[str, dict[str, Any]] = {  # all but what is named as the paper's
    "feature-k": {"ablation": {"feature": "k"}},
    "feature-k-mean": {"ablation": {"feature": "k-mean"}},
    "metric-dot": {"ablation": {"metric": "dot"}},
    "metric-euclidean": {"ablation": {"metric": "euclidean"}, "tau": -0.5},
    "metric-softmax": {"ablation": {"metric": "softmax"}, "tau": 0.01},
    "sequential": {"ablation": {"partition": "sequential"}},
    **{f"random-{seed}": {"ablation": {"partition": "random", "seed": seed}} for seed in range(5)},
    "unrefined": {"ablation": {"refine": False}},
    "sizes": {"prop_attn": True},
    "restored": {"restore": True},
}
_MAME = re.compile(rf"mame-(?:({'|'.join(PLACES)})-)?([^-]+)(?:-({'|'.join(ABLATED)}))?")


@dataclass(frozen=True, kw_only=True)
class Row(tables.Row):
    """One row; its `method` is one of `methods`, or None if `at` decides it.

    Attributes:
        rival: a name of RIVALS, or None.
        at: name of the row whose FLOPs the rival is brought to.
    """

    rival: str | None = None
    at: str | None = None


@cache
def row_named(name: str) -> Row:
    """Return the row that a name describes. Raises UserError for another name."""
    if name == BASELINE:
        return Row(name=name, label="baseline", method=Method())
    if name == DEFAULT:
        method = merged(None)
        return Row(name=name, label="MaMe default", method=method)
    kind, at, other = name.partition("@")
    if at and kind in RIVALS:
        target = row_named(other)
        if target.at is None and target.name != BASELINE:
            label = f"{RIVALS[kind].short}, FLOPs of {target.label}"
            return Row(name=name, label=label, rival=kind, at=other)
    match = _MAME.fullmatch(name)
    tau = None if match is None else _number(match[2], 1.0)
    if match is not None and tau is not None:
        words = [
            f"MaMe τ {tau:g}",
            *(part.replace("-", " ", 1) for part in match.group(1, 3) if part),
        ]
        method = merged(PLACES[match[1] or "first"], **{"tau": tau, **ABLATED.get(match[3], {})})
        return Row(name=name, label=f"{', '.join(words)} (paper)", method=method)
    kind, _, text = name.rpartition("-")
    knob = RIVALS.get(kind)
    value = _number(text, knob.most) if knob is not None else None
    if knob is not None and value is not None and not (knob.whole and value % 1):
        label, method = knob.label.format(f"{value:g}"), knob.make(value)
        return Row(name=name, label=label, rival=kind, method=method)
    raise UserError(
        "--rows: expected names such as baseline, mame-default, default-0.8, mame-0.8,"
        " mame-quarters-0.5, tome-8, evit-0.7, random-all-0.9, smaller-160 or tome@mame-0.8, got"
        f" {name!r}; correct it"
    )


def _number(text: str, most: float | None) -> float | None:
    """Return a finite number above 0 and at most `most`, or None for any other text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") and (most is None or value <= most) else None


def _with_rivals(name: str) -> list[str]:
    """Return a row with every rival at its FLOPs; our default is a rival of the paper's method."""
    return [name, *(f"{one}@{name}" for one in RIVALS if one != "default" or one not in name)]


# What each suite is, and the names of its rows besides the baseline.
SUITES: dict[str, tuple[str, list[str]]] = {
    "vit": (
        "Training-free: our default, keep .6 in its place, and the paper's tau .7, .8 and .9 in"
        " the first two thirds of the blocks, next to rivals at equal FLOPs.",
        [
            row
            for name in (DEFAULT, "default-0.6", "mame-0.7", "mame-0.8", "mame-0.9")
            for row in _with_rivals(name)
        ],
    ),
    "ablation": (
        "The paper's ablations at tau .8, and tau times number of blocks.",
        ["mame-0.8", *(f"mame-0.8-{name}" for name in ABLATED)]
        + [
            f"mame-{where}-{tau}"
            for where in ("third", "first", "all")
            for tau in (0.6, 0.7, 0.8, 0.9)
        ],
    ),
}


def chosen_rows(suite: str, names: str | None) -> list[Row]:
    """Return rows by name, the baseline first and each rival after the row whose FLOPs it takes.

    Args:
        suite: one of SUITES; its rows are used if `names` is None.
        names: names separated by commas, as the module describes them.

    Raises:
        UserError: the suite or a name is unknown.
    """
    if suite not in SUITES:
        raise UserError(
            f"--suite: expected one of {', '.join(SUITES)}, got {suite!r}; give one of these"
        )
    rows = {BASELINE: row_named(BASELINE)}
    for name in SUITES[suite][1] if names is None else map(str.strip, names.split(",")):
        row = row_named(name)
        for one in (row.at, row.name):
            if one is not None:
                rows.setdefault(one, row_named(one))
    return list(rows.values())
