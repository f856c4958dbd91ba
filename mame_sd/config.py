"""Every setting of merging, as one frozen dataclass that is checked when it is made.

Arguments that are left out (or `None`) are decided by the preset; after construction every field is concrete:

>>> MaMeConfig(tau=0.8).merge, MaMeConfig(tau=0.8).batch
('qkv', 'shared')
>>> MaMeConfig(keep=0.5).tau is None
True
>>> MaMeConfig(tau=0.8).replace(keep=0.5).to_dict(given_only=True)
{'keep': 0.5}
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, Literal

# What measurement chose (PRESETS["default"]) and the paper with our settled points (PRESETS["plain"]). A new
# default is one edit here. Keys: what was given, of tau and keep; "neither" holds what is then used.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "default": {
        "neither": {"keep": 0.25},
        "keep": {
            "merge": "kv",
            "partition": "random-grid",
            "redraw": True,
            "tiles": 16,
            "weights": "best",
        },
        "tau": {"merge": "qkv", "partition": "grid", "tiles": 0},
    },
    "plain": {
        "neither": {"tau": 0.8},
        "keep": {"merge": "qkv", "partition": "alternating", "tiles": 0},
        "tau": {"merge": "qkv", "partition": "alternating", "tiles": 0},
    },
}
# Cells of the grid when keep is given, from small to large: with about as many destinations as it allows, (nearly) every
# source merges, and merged keys stand for equally many tokens.
CELLS = ((1, 2), (1, 3), (2, 2), (2, 3), (2, 4), (3, 3), (3, 4), (4, 4))
COMMON: dict[str, Any] = {
    "stride": (2, 2),
    "seed": 0,
    "redraw": False,
    "min_tokens": 1024,
    "metric": "cosine",
    "feature": "x",
    "weights": "average",
    "refine": True,
    "variant": "settled",
    "eps": 1e-6,
    "kernel": None,
}
CHOICES: dict[str, tuple[str, ...]] = {
    "preset": ("default", "plain"),
    "partition": ("alternating", "sequential", "random", "grid", "random-grid"),
    "metric": ("cosine", "dot", "euclidean", "softmax"),
    "feature": ("x", "k", "k-mean"),
    "weights": ("average", "best"),
    "variant": ("settled", "paper"),
    "merge": ("qkv", "kv"),
    "kernel": ("triton",),
}
TAU_RANGE: dict[str, tuple[float, float]] = {
    "cosine": (-1.0, 1.0),
    "dot": (-math.inf, math.inf),
    "euclidean": (-math.inf, 0.0),
    "softmax": (0.0, 1.0),
}
DRAWN = ("random", "random-grid")  # partitions with a seed
PARTS = ("mlp", "cross")  # what can merge beside self-attention, each the share of tokens to keep there
SHARES = ("keep", *PARTS)
MAX_TILE = 16  # side of the largest tile that the kernel holds on the chip
PAPER_TAU = 0.8  # what variant="paper" takes when neither tau nor keep is given: it knows no keep

_UNSET: Any = None


def _field(help: str) -> Any:
    return field(default=_UNSET, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class MaMeConfig:
    """Settings of MaMe (merging) and MaRe (restoring).

    An argument that is `None` is decided by `preset` and by which of `tau` and `keep` is given. After construction
    exactly one of `tau` and `keep` is a number. `config.replace`, `copy.replace` and `dataclasses.replace` make a changed copy,
    in which the preset decides again on all that was never given.

    Raises:
        ValueError: naming the field, its range and the value that came.
    """

    tau: float | None = _field(
        "similarity above which a source token may merge (cosine: -1 to 1; 1 merges nothing). Lower merges more: "
        "faster, further from the unmerged image. Not together with keep"
    )
    keep: float | None = _field(
        "share of tokens to keep (above 0, at most 1) instead of a fixed tau; never fewer than the destinations. "
        "Lower is faster and, below 0.5, further from the unmerged image"
    )
    preset: Literal["default", "plain"] = _field(
        "default: what measurement chose; plain: the paper to the letter (global similarity, tau 0.8, alternating)"
    )
    partition: Literal["alternating", "sequential", "random", "grid", "random-grid"] = _field(
        "which tokens are destinations: alternating, sequential, random, grid (the first of each stride cell), or "
        "random-grid (one drawn from each cell)"
    )
    stride: tuple[int, int] = _field(
        "cell of the grid partitions as (rows, columns) of tokens. Larger: fewer destinations, so more can merge. (2, 2) "
        "unless given; with keep, the one from (1, 2) to (4, 4) that leaves as many destinations as keep allows"
    )
    seed: int = _field("seed of the random partitions (their own generator, never the global one)")
    redraw: bool = _field(
        "the random partitions take other destinations at each step, so that errors of the steps do not add up; by "
        "apply_mame, which sees the timestep, and not where gradients are on. True with the default preset's keep"
    )
    min_tokens: int = _field(
        "layers with fewer tokens are left alone. With MaMeAttnProcessor on a video model keep it above the number of frames"
    )
    metric: Literal["cosine", "dot", "euclidean", "softmax"] = _field(
        "similarity: cosine, dot (x.y / sqrt(d)), euclidean (-|x - y| / sqrt(d)), softmax over destinations"
    )
    feature: Literal["x", "k", "k-mean"] = _field(
        "what similarity compares: x (the layer's input), k (its keys), k-mean (keys averaged over the heads)"
    )
    weights: Literal["average", "best"] = _field(
        "average: a source is shared out over its similar destinations (the paper); best: its most similar one takes it whole"
    )
    refine: bool = _field(
        "adaptive weight refining: drop a source's weaker than average destinations; used by weights average only"
    )
    variant: Literal["settled", "paper"] = _field(
        "settled: exact weights, amplitude kept; paper: the printed equations with eps and a second division in MaRe"
    )
    eps: float = _field("epsilon of the printed equations; used by variant paper only")
    merge: Literal["qkv", "kv"] = _field(
        "qkv: merge before attention and restore after it (the paper); kv: merge keys and values only"
    )
    kernel: Literal["triton"] | None = _field(
        "triton: find and merge in fused kernels on a CUDA device, with weights best, metric cosine and tiles of at most "
        "16 (verified in Triton's interpreter, not yet timed on a GPU); PyTorch's operations unless given"
    )
    tiles: int = _field(
        "compare tokens only inside square tiles of this side, in tokens (at least 2); 0 compares all with all"
    )
    size: tuple[int, int] | None = _field("latent (height, width), for when the layer's cannot be known")
    mlp: float | None = _field(
        "share of tokens to keep in the feed-forward networks too (above 0, at most 1), restored after them; off unless "
        "given. The grid's cell follows from this share. UNets, DiT and PixArt by apply_mame only"
    )
    cross: float | None = _field("as mlp, of the queries of cross-attention")
    # What was given to the config that this one is made from: dataclasses.replace hands it on, beside every field.
    _given: InitVar[Mapping[str, Any] | None] = None

    def __post_init__(self, _given: Mapping[str, Any] | None) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        if _given is not None:
            before = _resolve(dict(_given))
            given = _changed(_given, {name: value for name, value in given.items() if value != before[name]})
        given = {name: value for name, value in given.items() if value is not None}
        for name in ("stride", "size"):
            if isinstance(given.get(name), list):
                given[name] = tuple(given[name])
        given = {name: _plain(name, value) for name, value in given.items()}
        _check_given(given)
        object.__setattr__(self, "_given", dict(given))
        for name, value in _resolve(given).items():
            object.__setattr__(self, name, value)
        _check_resolved(self)

    def replace(self, **changes: Any) -> MaMeConfig:
        """This config with `changes`, the preset deciding again on all that was never given.

        Giving `tau` drops a given `keep` and vice versa; `None` takes a given field back.
        """
        return MaMeConfig.from_dict(_changed(self.given, changes))

    __replace__ = replace

    @property
    def given(self) -> Mapping[str, Any]:
        """The fields that were given, by name; the preset decided on the others."""
        return dict(self.__dict__["_given"])

    @property
    def batch(self) -> str:
        """Which sources a batch preserves: "shared", any that one of its samples preserves (paper, "Batch Processing
        Implementation"), with `tau`; "per_sample", as many in each but its own, with `keep`."""
        return "shared" if self.keep is None else "per_sample"

    def of_part(self, name: str) -> MaMeConfig | None:
        """The settings that merge a part ("mlp" or "cross") of a block by itself; None where it is off.

        They are these, with the part's share as `keep`, from which the grid's cell follows. With `tau`, the preset decides again
        for a share wherever the value is what it decides for tau: global similarity would cost more than the part itself.
        """
        share = getattr(self, name)
        if share is None:
            return None
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.tau is not None:
            by_tau = _resolve({"preset": self.preset, "tau": self.tau})
            for field_name in ("partition", "redraw", "tiles", "weights"):
                if values[field_name] == by_tau[field_name]:
                    values[field_name] = None
        values |= {"tau": None, "keep": share, "stride": None, "merge": "qkv", "feature": "x"}
        return MaMeConfig(**{**values, **dict.fromkeys(PARTS)})

    def to_dict(self, given_only: bool = False) -> dict[str, Any]:
        """All fields and `batch` (or only the fields that were given) as JSON values; `from_dict` makes an equal config of either."""
        every = {f.name: getattr(self, f.name) for f in fields(self)} | {"batch": self.batch}
        values = self.given if given_only else every
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MaMeConfig:
        """A config of `values` by field name; `batch` may stand among them where it is what follows from the others.

        Raises ValueError for a name that is none.
        """
        check_names(values)
        config = cls(**{name: value for name, value in values.items() if name != "batch"})
        if values.get("batch", config.batch) not in (None, config.batch):
            limit = "tau" if config.keep is None else "keep"
            raise ValueError(
                f"batch: expected {config.batch!r}, which follows from {limit}, got {values['batch']!r}; leave batch out"
            )
        return config

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> MaMeConfig:
        """A config from a .json or .toml file that holds the given fields at its top level.

        Raises ValueError that names the file, for a file that can't be read, parsed or accepted.
        """
        try:
            return cls.from_dict(_read_table(Path(path)))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def check_names(values: Mapping[str, Any]) -> None:
    """Raises ValueError for a name in `values` that no setting has."""
    names = [f.name for f in fields(MaMeConfig)]
    for name in values:
        if name not in (*names, "batch"):
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown setting {name!r}{hint} (settings are {', '.join(names)})")


def _read_table(path: Path) -> dict[str, Any]:
    kind = path.suffix.lower()
    if kind not in (".json", ".toml"):
        raise ValueError(f"expected a .json or .toml file of settings, got {kind or 'no ending'}; rename or convert it")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"expected a .json or .toml file of settings that can be read, got {error}") from None
    try:
        if kind == ".toml":
            import tomllib

            values: Any = tomllib.loads(text)
        else:
            values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"expected {kind.lstrip('.')}, but {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f'expected an object of settings such as {{"tau": 0.8}}, got {values!r}')
    return values


def _resolve(given: dict[str, Any]) -> dict[str, Any]:
    """Every field of MaMeConfig, concrete: what was given over what the preset says."""
    preset = PRESETS[given.get("preset", "default")]
    chosen = dict(given)
    if "tau" not in chosen and "keep" not in chosen:
        chosen.update({"tau": PAPER_TAU} if given.get("variant") == "paper" else preset["neither"])
    table = preset["keep" if "keep" in chosen else "tau"]
    unset = dict.fromkeys(("tau", "keep", "size", *PARTS))
    values = {**unset, "preset": "default", **COMMON, **table, **chosen}
    if "keep" in chosen and "stride" not in chosen:
        values["stride"] = _cell(chosen["keep"], values["tiles"])
    return values


def _changed(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with `changes`, of which a tau drops a keep and a keep a tau."""
    dropped = {other for name, other in (("tau", "keep"), ("keep", "tau")) if changes.get(name) is not None}
    return {**{name: value for name, value in given.items() if name not in dropped}, **changes}


def _cell(keep: float, tile_side: int) -> tuple[int, int]:
    """The cell with the most destinations that is within the share `keep`, cells cut by a tile's border counted whole."""

    def share(cell: tuple[int, int]) -> float:
        return math.prod(math.ceil(tile_side / side) / tile_side if tile_side else 1 / side for side in cell)

    return max((cell for cell in CELLS if share(cell) <= keep + 1e-9), key=share, default=CELLS[-1])


def _check_given(given: dict[str, Any]) -> None:
    """Types, names and ranges of single fields, before any default is filled in."""
    for name, choices in CHOICES.items():
        if name in given and given[name] not in choices:
            raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {given[name]!r}")
    for name in ("tau", "eps", *SHARES):
        if name in given and (not _is_number(given[name]) or math.isnan(given[name])):
            raise ValueError(f"{name}: expected a number, got {given[name]!r}")
    if "tau" in given and "keep" in given:
        raise ValueError(f"expected tau or keep, got both (tau={given['tau']!r}, keep={given['keep']!r}); drop one")
    for name in SHARES:
        if name in given and not 0 < given[name] <= 1:
            raise ValueError(f"{name}: expected a share above 0 and at most 1, got {given[name]!r}")
    if "eps" in given and not 0 < given["eps"] < math.inf:
        raise ValueError(f"eps: expected a finite number above 0, got {given['eps']!r}")
    for name, low in (("seed", 0), ("min_tokens", 1)):
        if name in given and not (_is_int(given[name]) and low <= given[name] < 2**63):
            raise ValueError(f"{name}: expected a whole number of at least {low}, got {given[name]!r}")
    if "tiles" in given and not (_is_int(given["tiles"]) and (given["tiles"] == 0 or given["tiles"] >= 2)):
        raise ValueError(f"tiles: expected a side of at least 2 tokens, or 0 for none, got {given['tiles']!r}")
    for name in ("refine", "redraw"):
        if name in given and not isinstance(given[name], bool):
            raise ValueError(f"{name}: expected True or False, got {given[name]!r}")
    for name in ("stride", "size"):
        pair = given.get(name, (2, 2))
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(_is_int(n) and n >= 1 for n in pair)):
            raise ValueError(f"{name}: expected two whole numbers of at least 1, got {pair!r}")
    if given.get("stride") == (1, 1):
        raise ValueError("stride: expected a cell of more than one token, got (1, 1), which leaves nothing to merge")


def _check_resolved(config: MaMeConfig) -> None:
    """What fields demand of one another, once all are concrete."""
    if config.tau is not None:
        low, high = TAU_RANGE[config.metric]
        if not low <= config.tau <= high or math.isinf(config.tau):
            raise ValueError(
                f"tau: expected a finite number from {low:g} to {high:g} for metric {config.metric!r}, "
                f"got {config.tau!r}; give a tau in that range, or keep instead"
            )
    if config.variant == "paper" and (config.tau is None or config.merge != "qkv" or config.weights != "average"):
        raise ValueError(
            "variant: 'paper' knows only tau, merge='qkv' and weights='average' (the printed equations), "
            f"got tau={config.tau!r}, keep={config.keep!r}, merge={config.merge!r}, weights={config.weights!r}"
        )
    if config.kernel is not None and not (
        config.weights == "best" and config.metric == "cosine" and 0 < config.tiles <= MAX_TILE
    ):
        raise ValueError(
            f"kernel: {config.kernel!r} knows only weights='best', metric='cosine' and tiles from 2 to {MAX_TILE}, got "
            f"weights={config.weights!r}, metric={config.metric!r}, tiles={config.tiles}; change these, or leave kernel out"
        )
    if config.variant == "paper" and any(getattr(config, name) is not None for name in PARTS):
        raise ValueError(
            "variant: 'paper' merges self-attention alone, got "
            f"mlp={config.mlp!r}, cross={config.cross!r}; leave them out, or give variant='settled'"
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(name: str, value: Any) -> Any:
    """`value` with NumPy's and other real numbers as Python's own; what is no number comes back as it is."""
    if isinstance(value, tuple):
        return tuple(_plain(name, item) for item in value)
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral) and name not in ("tau", "eps", *SHARES):
        return int(value)
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name}: expected a number in the range of float, got a larger one") from None
    return value
