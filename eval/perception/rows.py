"""The rows of `classify`: names that say what runs, and the suites that list them.

| name | what runs |
|---|---|
| baseline | the model as it is |
| mame-default | what `apply_mame(model)` does |
| default-0.8 | the same at another share: keep in every second block |
| mame-0.8 | the paper's method, tau .8, in the first two thirds of the blocks (its first 8 of 12) |
| mame-quarters-0.5 | the same, tau .5, in blocks 3, 6 and 9 of 12 |
| tome-8 | ToMe, 8 tokens fewer in each block; tome-decreasing-8: 16 in the first, 0 in the last |
| evit-0.7, random-0.7 | pruning, random dropping in blocks 3, 6 and 9 of 12 |
| random-all-0.9 | random dropping in every block |
| smaller-160 | the unmerged model on images of 160 x 160 pixels |
| frames-4 | the unmerged model on so many frames of each clip |
| tome@mame-0.8 | a rival at the FLOPs of another row; so default@..., smaller@... and the others |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mame_sd.errors import UserError

from .. import tables
from .forms import FORMS, HALVED, LAST, PLAIN
from .methods import RIVALS, Merged, Unmerged

BASELINE = "baseline"
DEFAULT = "mame-default"
VIDEO = "video"  # the suite of clips
PICTURES = tuple(name for name in RIVALS if name != "frames")
CLIPS = ("tome", "random", "random-all", "smaller", "frames")  # rivals that can see clips
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
        weights: the form of training whose model answers, in the suite trained.
    """

    rival: str | None = None
    at: str | None = None
    weights: str = PLAIN


def row_named(name: str) -> Row:
    """The row that a name says. Raises UserError for another name."""
    rival, at, other = name.partition("@")
    if name == BASELINE:
        return Row(name=name, label="baseline", family="baseline", method=Unmerged())
    if at and rival in RIVALS:
        target = row_named(other)
        if target.at is None and target.name != BASELINE:
            label = f"{RIVALS[rival].short}, FLOPs of {target.label}"
            family = RIVALS[rival].family
            return Row(name=name, label=label, family=family, rival=rival, at=other)
    if name == DEFAULT:
        return _mame(name, "MaMe default", None, {}, default=True)
    kind, _, text = name.partition("-")
    if kind == "mame":
        where = "quarters" if text.startswith("quarters-") else "first"
        value = _number(text.removeprefix("quarters-"), 1.0)
        if value is not None:
            return _mame(name, f"MaMe τ {value:g} (paper)", where, {"tau": value})
    kind, _, text = name.rpartition("-")
    knob = RIVALS.get(kind)
    value = _number(text, knob.most) if knob is not None else None
    if knob is not None and value is not None and not (knob.whole and value % 1):
        label = knob.label.format(f"{value:g}")
        method = knob.make(value)
        return Row(name=name, label=label, family=knob.family, rival=kind, method=method)
    raise UserError(
        "--rows: expected names such as baseline, mame-default, default-0.8, mame-0.8,"
        " mame-quarters-0.5, tome-8, evit-0.7, random-0.7, random-all-0.9,"
        f" smaller-160, frames-4 or tome@mame-0.8, got {name!r}; correct it"
    )


def beside_rivals(*names: str, rivals: Sequence[str] = PICTURES) -> list[Row]:
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


def trained() -> list[Row]:
    """The unmerged model, merging that it was not trained with, with and without sizes counted, and
    every other form of training.
    """
    rows = [row_named(BASELINE)]
    default: dict[str, Any] = {"blocks": None}
    free = (
        ("free", "MaMe, not trained with it", HALVED),
        ("free-restored", "MaMe, not trained with it, restored", {**HALVED, "restore": True}),
        ("free-sizes", "MaMe, not trained with it, sizes counted", {**HALVED, "prop_attn": True}),
        ("default-free", "MaMe default, not trained with it", default),
        (
            "default-free-restored",
            "MaMe default, not trained with it, restored",
            {**default, "restore": True},
        ),
        (
            "default-free-no-sizes",
            "MaMe default, not trained with it, sizes not counted",
            {**default, "prop_attn": False},
        ),
        ("last-free", "MaMe in the last block, not trained with it", LAST),
        (
            "last-free-restored",
            "MaMe in the last block, not trained with it, restored",
            {**LAST, "restore": True},
        ),
    )
    rows += [_merged(name, label, PLAIN, merging) for name, label, merging in free]
    return [
        *rows,
        *(
            _merged(form.name, form.label, form.name, form.merging)
            for form in FORMS.values()
            if form.name != PLAIN
        ),
    ]


def _merged(name: str, label: str, weights: str, merging: dict[str, Any]) -> Row:
    if not merging:
        return Row(name=name, label=label, weights=weights, method=Unmerged())
    fields = {key: value for key, value in merging.items() if key != "blocks"}
    return _mame(f"mame-{name}", label, merging["blocks"], fields, weights=weights)


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
    return Row(name=name, label=label, family="mame", method=Merged(blocks, fields), **more)


def _number(text: str, most: float | None) -> float | None:
    """A finite number above 0 and at most `most`; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") and (most is None or value <= most) else None


SUITES: dict[str, tuple[str, list[Row]]] = {
    "vit": (
        (
            "Training-free: our default, keep .6 in its place, and the paper's tau .7, .8 and .9 in"
            " the first two thirds of the blocks, beside rivals at equal FLOPs."
        ),
        beside_rivals(DEFAULT, "default-0.6", "mame-0.7", "mame-0.8", "mame-0.9"),
    ),
    "zero-shot": (
        (
            "Zero-shot: our default, and the paper's tau for CLIP (.8), SigLIP (.9) and SigLIP 2"
            " (.95), beside our default and rivals at equal FLOPs."
        ),
        [
            row_named(BASELINE),
            row_named(DEFAULT),
            *beside_rivals("mame-0.8", "mame-0.9", "mame-0.95")[1:],
        ],
    ),
    "ablation": (
        ("The paper's ablations at tau .8, and tau times number of blocks."),
        ablation(),
    ),
    "trained": (
        (
            "Trained without merging and with it, tau .5 in blocks 3, 6 and 9 or in the last one;"
            " intervals are over seeds."
        ),
        trained(),
    ),
    VIDEO: (
        (
            "Clips: our default, keep .6 instead, and the paper's tau .8, .85 and .9, beside rivals"
            " at equal FLOPs, smaller frames and fewer frames."
        ),
        [
            *beside_rivals(DEFAULT, "default-0.6", rivals=CLIPS),
            *beside_rivals("mame-0.8", "mame-0.85", "mame-0.9", rivals=("default", "tome"))[1:],
        ],
    ),
}
