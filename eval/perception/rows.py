"""The rows of `classify`: names that say what runs, and the suites that list them.

| name | what runs |
|---|---|
| baseline | the model as it is |
| mame-default | what `apply_mame(model)` does |
| default-0.8 | the same at another share: keep in every second block |
| mame-0.8 | the paper's method, tau .8, in the first two thirds of the blocks (its first 8 of 12) |
| mame-quarters-0.5, mame-last-0.5 | the same, tau .5, in blocks 3, 6 and 9 of 12, or in the last |
| tome-8 | ToMe, 8 tokens fewer in each block; tome-decreasing-8: 16 in the first, 0 in the last |
| evit-0.7 | pruning in blocks 3, 6 and 9 of 12 |
| diffrate-deit-s | DiffRate at its published rates for DeiT-S; `rules.RATES` has them |
| random-all-0.9 | random dropping in every block |
| smaller-160 | the unmerged model on images of 160 x 160 pixels |
| tome@mame-0.8 | a rival at the FLOPs of another row; so default@..., smaller@... and the others |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mame_sd.errors import UserError

from .. import tables
from .methods import RIVALS, Method, merged, rival
from .rules import RATES, DiffRate

BASELINE = "baseline"
DEFAULT = "mame-default"
VIDEO = "video"  # the suite of clips
CLIPS = ("tome", "random-all")  # rivals that can see clips
PLACES = {"quarters": "quarters", "last": (-1,)}  # what may stand between mame- and tau
_ABLATED: tuple[tuple[str, dict[str, Any]], ...] = (  # all but what is named as the paper's
    ("feature-k", {"feature": "k"}),
    ("feature-k-mean", {"feature": "k-mean"}),
    ("metric-dot", {"metric": "dot"}),
    ("metric-euclidean", {"metric": "euclidean", "tau": -0.5}),
    ("metric-softmax", {"metric": "softmax", "tau": 0.01}),
    ("sequential", {"partition": "sequential"}),
    *((f"random-{seed}", {"partition": "random", "seed": seed}) for seed in range(5)),
    ("unrefined", {"refine": False}),
    ("sizes", {"prop_attn": True}),
    ("restored", {"restore": True}),
)
_TAUS = (0.6, 0.7, 0.8, 0.9)
_DEPTHS = {
    "third": "first third of the blocks",
    "first": "first two thirds of the blocks",
    "all": "all blocks",
}


@dataclass(frozen=True, kw_only=True)
class Row(tables.Row):
    """One row; its `method` is one of `methods`, None where `at` decides it.

    Attributes:
        rival: a name of RIVALS; None: none.
        at: name of the row whose FLOPs the rival is brought to.
    """

    rival: str | None = None
    at: str | None = None


def row_named(name: str) -> Row:
    """The row that a name says. Raises UserError for another name."""
    kind, at, other = name.partition("@")
    if name == BASELINE:
        return Row(name=name, label="baseline", family="baseline", method=Method())
    if at and kind in RIVALS:
        target = row_named(other)
        if target.at is None and target.name != BASELINE:
            label = f"{RIVALS[kind].short}, FLOPs of {target.label}"
            return Row(name=name, label=label, family=RIVALS[kind].family, rival=kind, at=other)
    if name == DEFAULT:
        return _mame(name, "MaMe default", None, {}, default=True)
    kind, _, text = name.partition("-")
    if kind == "diffrate" and text in RATES:
        return Row(name=name, label=f"DiffRate, {text}", method=rival(DiffRate(text)))
    if kind == "mame":
        where, _, tau = text.rpartition("-")
        value = _number(tau, 1.0)
        if value is not None and (not where or where in PLACES):
            words = f"MaMe τ {value:g}{f', {where}' if where else ''} (paper)"
            return _mame(name, words, PLACES.get(where, "first"), {"tau": value})
    kind, _, text = name.rpartition("-")
    knob = RIVALS.get(kind)
    value = _number(text, knob.most) if knob is not None else None
    if knob is not None and value is not None and not (knob.whole and value % 1):
        label, method = knob.label.format(f"{value:g}"), knob.make(value)
        return Row(name=name, label=label, family=knob.family, rival=kind, method=method)
    raise UserError(
        "--rows: expected names such as baseline, mame-default, default-0.8, mame-0.8,"
        f" mame-quarters-0.5, tome-8, evit-0.7, diffrate-{', diffrate-'.join(RATES)},"
        f" random-all-0.9, smaller-160 or tome@mame-0.8, got {name!r}; correct it"
    )


def beside_rivals(*names: str, rivals: Sequence[str] = tuple(RIVALS)) -> list[Row]:
    """The baseline, and each of these rows with every rival at its FLOPs, our default among
    them.
    """
    rows = [row_named(BASELINE)]
    for name in names:
        row = row_named(name)
        ours = row.default or row.rival == "default"
        others = [rival for rival in rivals if not (ours and rival == "default")]
        rows += [row, *(row_named(f"{rival}@{name}") for rival in others)]
    return rows


def ablation() -> list[Row]:
    """The paper's ablations."""
    rows = [row_named(BASELINE), row_named("mame-0.8")]
    for name, fields in _ABLATED:
        label = f"τ 0.8, {name.replace('-', ' ', 1)}"
        rows.append(_mame(f"mame-0.8-{name}", label, "first", {"tau": 0.8, **fields}))
    for where, words in _DEPTHS.items():
        rows += [
            _mame(f"mame-{where}-{tau:g}", f"τ {tau:g}, {words}", where, {"tau": tau})
            for tau in _TAUS
        ]
    return rows


def chosen_rows(suite: str, names: str | None) -> list[Row]:
    """The rows of these names, with commas between, the baseline first and each rival after the row
    whose FLOPs it takes.

    Args:
        suite: one of SUITES; its rows are known by their names, and are what None means.
        names: any names, of the suite or made as the module says.

    Raises:
        UserError: an unknown suite or name.
    """
    if suite not in SUITES:
        raise UserError(
            f"--suite: expected one of {', '.join(SUITES)}, got {suite!r}; give one of these"
        )
    own = {row.name: row for row in SUITES[suite][1]}
    if names is None:
        return list(own.values())
    found: dict[str, Row] = {BASELINE: own[BASELINE]}
    for name in (part.strip() for part in names.split(",")):
        row = own.get(name) or row_named(name)
        for one in (row.at, row.name):
            if one is not None:
                found.setdefault(one, own.get(one) or row_named(one))
    return list(found.values())


def _mame(name: str, label: str, blocks: Any, fields: dict[str, Any], **more: Any) -> Row:
    return Row(name=name, label=label, family="mame", method=merged(blocks, **fields), **more)


def _number(text: str, most: float | None) -> float | None:
    """A finite number above 0 and at most `most`; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") and (most is None or value <= most) else None


SUITES: dict[str, tuple[str, list[Row]]] = {
    "vit": (
        "Training-free: our default, keep .6 in its place, and the paper's tau .7, .8 and .9 in"
        " the first two thirds of the blocks, beside rivals at equal FLOPs.",
        beside_rivals(DEFAULT, "default-0.6", "mame-0.7", "mame-0.8", "mame-0.9"),
    ),
    "zero-shot": (
        "Zero-shot: our default, and the paper's tau for CLIP (.7, .8), SigLIP (.8, .9) and SigLIP"
        " 2 (.9, .95), beside our default and rivals at equal FLOPs.",
        [
            row_named(BASELINE),
            row_named(DEFAULT),
            *beside_rivals("mame-0.7", "mame-0.8", "mame-0.9", "mame-0.95")[1:],
        ],
    ),
    "ablation": ("The paper's ablations at tau .8, and tau times number of blocks.", ablation()),
    VIDEO: (
        "Clips: our default, keep .6 instead, and the paper's tau .8, .85 and .9, beside rivals"
        " at equal FLOPs.",
        [
            *beside_rivals(DEFAULT, "default-0.6", rivals=CLIPS),
            *beside_rivals("mame-0.8", "mame-0.85", "mame-0.9", rivals=("default", "tome"))[1:],
        ],
    ),
}
