"""Every setting of merging, as one frozen dataclass that is checked when it is made.

Arguments that are left out (or `None`) are decided by the preset; after construction every field is concrete:

>>> MaMeConfig(tau=0.8).merge, MaMeConfig(tau=0.8).batch
('kv', 'shared')
>>> MaMeConfig(keep=0.5).tau is None
True
>>> MaMeConfig(tau=0.8).replace(keep=0.5).to_dict(given_only=True)
{'keep': 0.5}
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal

from mame_sd.config_checks import PARTS, check_given, check_resolved, plain
from mame_sd.layer_rules import LayerRules
from mame_sd.presets import resolve

BESIDE = "mame.json"  # a file of settings in a model's folder, which merging takes where nothing else is given
_UNSET: Any = None
# Names that files of older versions hold: `batch` follows from tau and keep, and `kernel` from the device.
_FORMER = ("batch", "kernel")


def _field(help: str, option: bool = True) -> Any:
    """A field that the preset decides unless it is given; `option`: whether commands have one for it."""
    return field(default=_UNSET, metadata={"help": help, "option": option})


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
        "apply_mame, which sees the timestep, and not where gradients are on"
    )
    pairs: bool = _field(
        "the guided and the unguided sample of a prompt merge the same tokens, so that guidance does not multiply a difference of "
        "merging: in calls of a model whose batch holds the same input twice (samples of one seed too, at their first step), and in two "
        "calls of one input; by apply_mame, which sees it, and not where gradients are on"
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
    weights: Literal["average", "best", "pick"] = _field(
        "average: a source is shared out over its similar destinations (the paper); best: its most similar one takes it whole; "
        "pick: destinations stay as they are and sources that would merge are dropped, of keys and values only (merge kv)"
    )
    correct: bool = _field(
        "give attention back what merged keys lose: to first order, the mean and covariance of all keys and values, a control variate, where "
        "the processor calls scaled_dot_product_attention; on with weights best, which need a part of the keys for it (others need all). "
        "With merge qkv beside text, merged tokens count as often as they stand for tokens instead"
    )
    refine: bool = _field(
        "adaptive weight refining: drop a source's weaker than average destinations; used by weights average only"
    )
    variant: Literal["settled", "paper"] = _field(
        "settled: exact weights, amplitude kept; paper: the printed equations with eps and a second division in MaRe"
    )
    eps: float = _field("epsilon of the printed equations; used by variant paper only")
    merge: Literal["qkv", "kv"] = _field(
        "qkv: merge before attention and restore after it (the paper); kv: merge keys and values only. Where neither it nor keep, tau, weights, "
        "variant and a preset is given, SD3 and AuraFlow take qkv with keep 0.625"
    )
    detail: bool = _field(
        "restored tokens of one group differ, as the groups around them and as their inputs do, around the group's own mean, in place of "
        "equal copies. Where tokens are restored (merge qkv, mlp, cross); with weights best alone"
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
    layers: LayerRules | None = _field(  # noqa: RUF009
        "settings of single layers by patterns of their names, over those of all: {'blocks.[24]': {'keep': 0.5}}; False leaves a layer "
        "unmerged. Self-attention by apply_mame only",
        option=False,
    )
    made_for: str | None = _field(
        "which model the settings were found for, as calibration writes it; others refuse them", option=False
    )
    # What holds for tokens whose height and width are unknown: no grid, no tiles, copies restored. Of each config its own, made with it, for
    # compiled graphs can't make configs.
    without_plane: ClassVar[MaMeConfig]
    # What was given to the config that this one is made from: dataclasses.replace hands it on, beside every field.
    _given: InitVar[Mapping[str, Any] | None] = None

    def __post_init__(self, _given: Mapping[str, Any] | None) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        if _given is not None:
            check_names(_given)
            before = resolve(dict(_given))
            given = _changed(_given, {name: value for name, value in given.items() if value != before[name]})
        given = {name: value for name, value in given.items() if value is not None}
        for name in ("stride", "size"):
            if isinstance(given.get(name), list):
                given[name] = tuple(given[name])
        if not isinstance(given.get("layers", LayerRules({})), LayerRules):
            given["layers"] = LayerRules(given["layers"])
        given = {name: plain(name, value) for name, value in given.items()}
        check_given(given)
        object.__setattr__(self, "_given", dict(given))
        for name, value in resolve(given).items():
            object.__setattr__(self, name, value)
        check_resolved(self)
        partition = "alternating" if self.partition.endswith("grid") else self.partition
        gridless = {"partition": partition, "tiles": 0, "detail": False, "layers": None}
        already = all(getattr(self, name) == value for name, value in gridless.items())
        object.__setattr__(self, "without_plane", self if already else self.replace(**gridless))
        for pattern, rule in (self.layers or {}).items():
            self._with_rule(rule, pattern)

    def replace(self, **changes: Any) -> MaMeConfig:
        """This config with `changes`, the preset deciding again on all that was never given.

        Giving `tau` drops a given `keep` and vice versa; `None` takes a given field back.
        """
        return MaMeConfig.from_dict(_changed(self.given, changes))

    __replace__ = replace

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Made anew of what was given: a pickle of an older version may hold other fields, `batch` among them."""
        self.__init__(**{name: value for name, value in state["_given"].items() if name not in _FORMER})  # type: ignore[misc]

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

        They are these, with the part's share as `keep`, from which the grid's cell follows. The preset decides again on `weights` where
        they are "pick", which leaves nothing to restore a part from.
        """
        share = getattr(self, name)
        if share is None:
            return None
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.weights == "pick":  # a part is restored
            values["weights"] = None
        values |= {
            "tau": None,
            "keep": share,
            "stride": None,
            "merge": "qkv",
            "correct": None,
            "feature": "x",
            "layers": None,
        }
        return MaMeConfig(**{**values, **dict.fromkeys(PARTS)})

    def of_layer(self, name: str) -> MaMeConfig | None:
        """The settings of the self-attention of that name, as a report gives it; None: `layers` leaves it unmerged."""
        if self.layers is None:
            return self
        rule = self.layers.of(name)
        return None if rule is False else self._with_rule(rule or {}, name)

    def _with_rule(self, rule: Any, of: str) -> MaMeConfig | None:
        """These settings with those of a rule over them. Raises ValueError that names what the rule is of."""
        if rule is False:
            return None
        try:
            check_names(rule)
            return self.replace(**{"layers": None, **rule})
        except (TypeError, ValueError) as error:
            raise ValueError(f"layers: {of}: {error}") from None

    def to_dict(self, given_only: bool = False) -> dict[str, Any]:
        """All fields and `batch` (or only the fields that were given) as JSON values; `from_dict` makes an equal config of either."""
        every = {f.name: getattr(self, f.name) for f in fields(self)} | {"batch": self.batch}
        values = self.given if given_only else every
        return {name: _json(value) for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MaMeConfig:
        """A config of `values` by field name; `batch` may stand among them where it is what follows from the others.

        Raises ValueError for a name that no setting has, a value that can't be, and another `batch`.
        """
        check_names(values)
        config = cls(**{name: value for name, value in values.items() if name not in _FORMER})
        if values.get("batch", config.batch) not in (None, config.batch):
            limit = "tau" if config.keep is None else "keep"
            raise ValueError(
                f"batch: expected {config.batch!r}, which follows from {limit}, got {values['batch']!r}; leave batch out"
            )
        return config

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> MaMeConfig:
        """A config from a .json or .toml file that holds the given fields at its top level. `about`, where
        a file tells how it was found, is left to readers.

        Raises ValueError that names the file, for a file that can't be read, parsed or accepted.
        """
        try:
            table = _read_table(Path(path))
            table.pop("about", None)
            return cls.from_dict(table)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from None


def check_names(values: Mapping[str, Any]) -> None:
    """Raises ValueError for a name in `values` that no setting has."""
    names = [f.name for f in fields(MaMeConfig)]
    for name in values:
        if name not in (*names, *_FORMER):
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown setting {name!r}{hint} (settings are {', '.join(names)})")


def once_each(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs of a JSON file. Raises ValueError for a name that stands there twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} stands in one object twice")
        found[name] = value
    return found


def _read_table(path: Path) -> dict[str, Any]:
    kind = path.suffix.lower()
    if kind not in (".json", ".toml"):
        raise ValueError(f"expected a .json or .toml file of settings, got {kind or 'no ending'}; rename or convert it")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"expected a .json or .toml file of settings that can be read, got {error}") from None
    try:
        if kind == ".toml":
            import tomllib

            values: Any = tomllib.loads(text)
        else:
            values = json.loads(text, object_pairs_hook=once_each)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected {kind.lstrip('.')}, but {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f'expected an object of settings such as {{"tau": 0.8}}, got {values!r}')
    return values


def _json(value: Any) -> Any:
    """A field's value as a JSON value."""
    if isinstance(value, LayerRules):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


def _changed(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with `changes`, of which a tau drops a keep and a keep a tau."""
    dropped = {other for name, other in (("tau", "keep"), ("keep", "tau")) if changes.get(name) is not None}
    return {**{name: value for name, value in given.items() if name not in dropped}, **changes}
