"""Every setting of merging, as one frozen dataclass that is checked when it is made.

Arguments that are left out (or `None`) are decided by the preset; after construction every field is
concrete:

>>> MaMeConfig(tau=0.8).merge, MaMeConfig(tau=0.8).keep is None
('kv', True)
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

# a file of settings in a model's folder, which merging takes where nothing else is given
SETTINGS_FILE = "mame.json"
_UNSET: Any = None


def _field(help: str, about: str = "", option: bool = True) -> Any:
    """A field that the preset decides unless it is given.

    Args:
        help: what it does, in one line.
        about: what docs/settings.md tells beyond that.
        option: whether commands have an option for it.
    """
    return field(default=_UNSET, metadata={"help": help, "about": about, "option": option})


def _study(help: str, about: str = "") -> Any:
    """A field of `Study`: commands take it by --study."""
    return _field(help, about, option=False)


@dataclass(frozen=True, kw_only=True)
class StudyFields:
    """What `Study` and `MaMeConfig` share: the settings that the paper's ablations vary."""

    partition: Literal["alternating", "sequential", "random", "grid", "random-grid"] = _study(
        "how destinations are chosen by position",
        "`grid` takes the first token of each stride cell, `random-grid` draws one of each cell.",
    )
    stride: tuple[int, int] = _study(
        "cell of the grid partitions, (rows, columns) of tokens",
        "A larger cell has fewer destinations, so more tokens can merge. With `keep` the cell, from"
        " (1, 2) to (4, 4), follows from how many destinations `keep` allows.",
    )
    redraw: bool = _study(
        "whether each step draws other destinations",
        "Errors of the steps then do not add up. Only `apply_mame` sees the timestep, and only"
        " where gradients are off.",
    )
    pairs: bool = _study(
        "whether guided and unguided samples merge the same tokens",
        "Guidance would multiply what merging does to one sample and not to the other. The two may"
        " share a batch, or be two calls of one input. Only `apply_mame` sees them, and only where"
        " gradients are off.",
    )
    metric: Literal["cosine", "dot", "euclidean", "softmax"] = _study(
        "how similarity is measured",
        "`dot` is x.y / sqrt(d), `euclidean` is -|x - y| / sqrt(d), and `softmax` is the dot"
        " product's softmax over destinations.",
    )
    feature: Literal["x", "k", "k-mean"] = _study(
        "what similarity compares: the layer's input, its keys, or their mean over heads"
    )
    weights: Literal["average", "best", "pick"] = _study(
        "how a source is shared out over destinations",
        "`average` shares it over all similar ones, as the paper does. `best` gives it to the most"
        " similar one. `pick` drops it, which keys and values alone allow.",
    )
    correct: bool = _study(
        "whether attention gets back what merged keys lose",
        "It gives back the first order, by the mean and covariance of all keys and values (a"
        " control variate). The processor must call `scaled_dot_product_attention`. By default"
        ' it is on with `weights="best"`, which needs only a part of the keys for it. Where whole'
        " tokens merge beside text, each one counts for all the tokens that it stands for.",
    )
    refine: bool = _study(
        "whether weights below a source's mean are dropped",
        'This is the paper\'s adaptive refining. Only `weights="average"` has it.',
    )
    variant: Literal["settled", "paper"] = _study(
        "which equations merge",
        "`settled` has exact weights and keeps the amplitude. `paper` follows the printed"
        " equations, with eps and a second division in MaRe.",
    )
    eps: float = _study("epsilon of the printed equations", 'Only `variant="paper"` has one.')
    detail: bool = _study(
        "whether restored tokens of one group differ",
        "Around the group's mean they then differ as their inputs and the groups beside them do."
        ' It acts where tokens are restored (merge qkv, mlp), and needs `weights="best"`.',
    )


@dataclass(frozen=True, kw_only=True)
class Study(StudyFields):
    """Settings that the paper's ablations vary: `apply_mame(pipe, study=Study(weights="pick"))`.

    A field that is None is decided by the preset. Values are checked by the `MaMeConfig` that takes
    them.
    """

    def given(self) -> dict[str, Any]:
        """The fields that were given, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


STUDY = tuple(f.name for f in fields(Study))


@dataclass(frozen=True, kw_only=True)
class MaMeConfig(StudyFields):
    """Settings of MaMe (merging) and MaRe (restoring).

    An argument that is `None` is decided by `preset` and by which of `tau` and `keep` is given.
    After construction exactly one of `tau` and `keep` is a number. What ablations vary is given as
    `study=Study(...)`. `config.study` holds its concrete values, and so do attributes such as
    `config.weights`. `config.replace`, `copy.replace` and `dataclasses.replace` make a changed
    copy, in which the preset decides again on all that was never given.

    Raises:
        ValueError: naming the field, its range and the value that came.
        TypeError: a field of `Study` is given by its name alone.
    """

    tau: float | None = _field(
        "similarity above which a token may merge; lower is faster and further off",
        "The cosine goes from -1 to 1, where 1 merges nothing. Give `tau` or `keep`, not both.",
    )
    keep: float | None = _field(
        "share of tokens to keep, above 0 to 1; lower is faster and further off",
        "It finds a threshold for each layer, call and sample. The destinations always stay.",
    )
    preset: Literal["default", "plain"] = _field(
        "which defaults hold: those that measurement chose, or the paper's (plain)",
        "`plain` compares all tokens with all, at tau 0.8, with alternating destinations.",
    )
    merge: Literal["qkv", "kv"] = _field(
        "what merges: keys and values alone (kv), or whole tokens, restored afterwards (qkv)",
        "Where none of `merge`, `keep`, `tau`, `preset`, `weights` and `variant` is given, SD3 and"
        " AuraFlow take qkv with keep 0.625.",
    )
    min_tokens: int = _field(
        "layers with fewer tokens stay unmerged",
        "With `MaMeAttnProcessor` on a video model it must be above the number of frames.",
    )
    tiles: int = _field(
        "side of the square tiles that tokens are compared in; 0 compares all",
        "A tile has at least 2 tokens a side.",
    )
    seed: int = _field(
        "seed of the destinations that are drawn",
        "It has a generator of its own, never the global one.",
    )
    size: tuple[int, int] | None = _field(
        "latent height and width, for layers that don't know them",
        "`MaMeAttnProcessor` and single attention modules need it. Models know theirs, and refuse"
        " another.",
        option=False,
    )
    mlp: float | None = _field(
        "share of tokens to keep in feed-forward networks too; off unless given",
        "Above 0 to 1. Tokens are restored after the network. UNets, DiT and PixArt take it, by"
        " `apply_mame`.",
    )
    references: float | None = _field(
        "share of each reference image's tokens to keep in an edit; off unless given",
        "Above 0 to 1. Each reference's keys and values merge on a grid of their own, while `keep`"
        " or `tau` holds for the image. Models of edits take it, by `apply_mame`.",
    )
    layers: LayerRules | None = _field(  # noqa: RUF009
        "settings of single layers by patterns of their names",
        "They override those of all layers: `{'blocks.[24]': {'keep': 0.5}}`. False leaves a layer"
        " unmerged. Self-attention takes them, by `apply_mame`.",
        option=False,
    )
    made_for: str | None = _field(
        "model that the settings were found for; others refuse them",
        "Calibration writes it.",
        option=False,
    )
    # Settings of ablations; a flat name that is given overrides its field. Concrete after
    # construction.
    study: InitVar[Study | Mapping[str, Any] | None] = None
    # Settings for tokens whose height and width are unknown: no grid, no tiles, copies restored.
    # Each config makes its own at once, for compiled graphs can't make configs.
    without_plane: ClassVar[MaMeConfig]
    # Settings for reference images, with their share as `keep`. None leaves them unmerged.
    of_references: ClassVar[MaMeConfig | None]
    # What was given to the config that this one is made from: dataclasses.replace hands it on,
    # beside every field.
    _given: InitVar[Mapping[str, Any] | None] = None

    def __post_init__(self, study: Any, _given: Mapping[str, Any] | None) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        given |= {name: given.pop(name) for name in STUDY}  # last
        if _given is None:
            refuse_flat(given)
            given |= {
                name: value for name, value in study_given(study).items() if given[name] is None
            }
        else:
            given |= {} if study is None else _changed_study(study, given)
            check_names(_given)
            before = resolve(dict(_given))
            given = _changed(
                _given, {name: value for name, value in given.items() if value != before[name]}
            )
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
        object.__setattr__(self, "study", Study(**{name: getattr(self, name) for name in STUDY}))
        partition = "alternating" if self.partition.endswith("grid") else self.partition
        gridless = {"partition": partition, "tiles": 0, "detail": False, "layers": None}
        already = all(getattr(self, name) == value for name, value in gridless.items())
        object.__setattr__(self, "without_plane", self if already else self.replace(**gridless))
        own = {"keep": self.references, "references": None, "layers": None, "stride": None}
        of_references = None if self.references is None else self.replace(**own)
        object.__setattr__(self, "of_references", of_references)
        for pattern, rule in (self.layers or {}).items():
            self._with_rule(rule, pattern)

    def replace(self, **changes: Any) -> MaMeConfig:
        """This config with `changes`, the preset deciding again on all that was never given.

        Giving `tau` drops a given `keep` and vice versa; `None` takes a given field back, and
        `study=None` all of `Study`'s.
        """
        return MaMeConfig.from_dict(_changed(self.given, changes))

    __replace__ = replace

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Made anew of what was given."""
        self.__init__(**_nested(state["_given"]))  # type: ignore[misc]

    @property
    def given(self) -> Mapping[str, Any]:
        """The fields that were given, by name; the preset decided on the others."""
        return dict(self.__dict__["_given"])

    @property
    def batch(self) -> str:
        """Which sources a batch preserves. "shared": any that one of its samples preserves (paper,
        "Batch Processing Implementation"), with `tau`. "per_sample": as many in each but its own,
        with `keep`.
        """
        return "shared" if self.keep is None else "per_sample"

    def of_part(self, name: str) -> MaMeConfig | None:
        """The settings that merge a part ("mlp") of a block by itself; None where it is off.

        They are these, with the part's share as `keep`, from which the grid's cell follows. The
        preset decides again on `weights` where they are "pick", which leaves nothing to restore a
        part from.
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
            "references": None,
        }
        return MaMeConfig.from_dict({**values, **dict.fromkeys(PARTS)})

    def of_layer(self, name: str) -> MaMeConfig | None:
        """The settings of the self-attention of that name, as a report gives it; None: `layers`
        leaves it unmerged.
        """
        if self.layers is None:
            return self
        rule = self.layers.of(name)
        return None if rule is False else self._with_rule(rule or {}, name)

    def _with_rule(self, rule: Any, of: str) -> MaMeConfig | None:
        """These settings with those of a rule over them.

        Raises ValueError that names what the rule is of.
        """
        if rule is False:
            return None
        try:
            check_names(rule)
            return self.replace(**{"layers": None, **rule})
        except (TypeError, ValueError) as error:
            raise ValueError(f"layers: {of}: {error}") from None

    def to_dict(self, given_only: bool = False) -> dict[str, Any]:
        """All fields (or only those that were given) as JSON values, those of `Study` in `study`.

        `from_dict` makes an equal config of either.
        """
        every = {f.name: getattr(self, f.name) for f in fields(self)}
        return _nested(
            {name: _json(value) for name, value in (self.given if given_only else every).items()}
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MaMeConfig:
        """A config of `values` as `to_dict` gives them, or by field name as `given` does.

        Raises ValueError for a name that no setting has and a value that can't be.
        """
        check_names(values)
        return cls(**_nested(values))

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> MaMeConfig:
        """A config from a .json or .toml file that holds the given fields at its top level.

        `about`, where a file tells how it was found, is left to readers.

        Raises ValueError that names the file, for a file that can't be read, parsed or accepted.
        """
        try:
            table = _read_table(Path(path))
            table.pop("about", None)
            flat = [name for name in STUDY if name in table]
            if flat:
                raise ValueError(
                    f"{', '.join(flat)}: belong to study; write them in it, as in"
                    f' {{"study": {{"{flat[0]}": ...}}}}'
                )
            return cls.from_dict(table)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from None


def check_names(values: Mapping[str, Any]) -> None:
    """Raises ValueError for a name in `values` that no setting has."""
    names = [f.name for f in fields(MaMeConfig)]
    top = [*(name for name in names if name not in STUDY), "study"]
    for name in values:
        if name not in (*names, "study"):
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown setting {name!r}{hint} (settings are {', '.join(top)})")


def study_given(study: Any) -> dict[str, Any]:
    """The fields that a `study`, a `Study` or a mapping of its fields, gives.

    Raises ValueError for anything else.
    """
    if study is None:
        return {}
    if isinstance(study, Study):
        return study.given()
    if not isinstance(study, Mapping):
        raise ValueError(f"study: expected a Study or a mapping of its fields, got {study!r}")
    for name in study:
        if name not in STUDY:
            raise ValueError(f"study: expected fields of Study ({', '.join(STUDY)}), got {name!r}")
    return {name: value for name, value in study.items() if value is not None}


def refuse_flat(values: Mapping[str, Any]) -> None:
    """Raises TypeError, in one line with the new place, for fields of `Study` among `values`."""
    flat = [name for name in STUDY if values.get(name) is not None]
    if flat:
        given = ", ".join(f"{name}={values[name]!r}" for name in flat)
        raise TypeError(f"{', '.join(flat)}: moved to Study; give study=Study({given})")


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` by field name with those of `Study` in `study`, over what `study` gives already."""
    study = {name: values[name] for name in STUDY if values.get(name) is not None}
    rest = {name: value for name, value in values.items() if name not in STUDY}
    return rest | ({"study": {**study_given(rest.get("study")), **study}} if study else {})


def _changed_study(study: Any, flat: Mapping[str, Any]) -> dict[str, Any]:
    """What a `study` that dataclasses.replace hands on changes of the `flat` values beside it."""
    return {name: value for name, value in study_given(study).items() if value != flat[name]}


def once_each(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs of a JSON file.

    Raises ValueError for a name that stands there twice.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} stands in one object twice")
        found[name] = value
    return found


def _read_table(path: Path) -> dict[str, Any]:
    kind = path.suffix.lower()
    if kind not in (".json", ".toml"):
        raise ValueError(
            f"expected a .json or .toml file of settings, got {kind or 'no ending'}; rename or"
            " convert it"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"expected a .json or .toml file of settings that can be read, got {error}"
        ) from None
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
    if "study" in changes:
        study = changes["study"]
        given = {
            name: value for name, value in given.items() if study is not None or name not in STUDY
        }
        changes = study_given(study) | {
            name: value for name, value in changes.items() if name != "study"
        }
    dropped = {
        other for name, other in (("tau", "keep"), ("keep", "tau")) if changes.get(name) is not None
    }
    return {**{name: value for name, value in given.items() if name not in dropped}, **changes}
