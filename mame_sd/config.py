"""Define every setting of merging, in one frozen dataclass that is checked when it is made.

The method follows from the number that is given:

>>> MaMeConfig(keep=0.5).method, MaMeConfig(tau=0.8).method
('keys', 'tokens')

`keep` merges keys and values at the attention call and fits the merged values (ours). `tau` merges
whole tokens before the attention and restores them after it (MaMe and MaRe, arXiv 2604.13432).
"""

from __future__ import annotations

import contextlib
import difflib
import numbers
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from inspect import getdoc
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from mame_sd.json_files import read_object
from mame_sd.layer_rules import LayerRules, means

# File of settings in a model's folder. Merging uses it if no other settings are given.
SETTINGS_FILE = "mame.json"
DEFAULT_KEEP = 0.25
DEFAULT_MLP_KEEP = 0.125
DEFAULT_REFERENCES = 0.25
Check = Callable[[Any], Any]  # returns a field's stored value, or raises ValueError
Method = Literal["keys", "tokens"]


def _check(
    expected: str, kind: type, store: Callable[[Any], Any], allowed: Callable[[Any], bool]
) -> Check:
    def check(value: Any) -> Any:
        is_bool = isinstance(value, bool) and kind is not bool
        if is_bool or not isinstance(value, kind) or not allowed(value):
            raise ValueError(f"expected {expected}")
        return store(value)

    return check


def _whole(least: int) -> Check:
    expected = f"a whole number from {least} to 2^63 - 1"
    return _check(expected, numbers.Integral, int, lambda n: least <= n < 2**63)


_cosine = _check("a number from -1 to 1", numbers.Real, float, lambda n: -1 <= n <= 1)
_share = _check("a share above 0 and at most 1", numbers.Real, float, lambda n: 0 < n <= 1)
_tile = "0 for no tiles, or a side of 2 to 2^31 - 1 tokens"
_side = _check(_tile, numbers.Integral, int, lambda n: n == 0 or 2 <= n < 2**31)
_flag = _check("True or False", bool, bool, lambda _: True)
_text = _check("what calibration wrote, or nothing", str, str, lambda _: True)


def _size(value: Any) -> tuple[int, int]:
    side = _check("", numbers.Integral, int, lambda n: 1 <= n < 2**31)
    try:
        h, w = value if isinstance(value, (list, tuple)) else ()  # sets have no order
        return side(h), side(w)
    except (TypeError, ValueError):
        raise ValueError("expected two whole numbers from 1 to 2^31 - 1") from None


def _setting(default: Any, check: Check, *, keys_only: bool = False) -> Any:
    """Declare a setting, which the docstring of `MaMeConfig` describes.

    `check` returns the value as a config stores it, or raises ValueError. If `keys_only`, the
    setting has no meaning with `tau`.
    """
    return field(default=default, metadata={"check": check, "keys_only": keys_only})


@dataclass(frozen=True, kw_only=True)
class MaMeConfig:
    """Settings of merging.

    If neither `tau` nor `keep` is given, `keep` is `DEFAULT_KEEP` and `is_default` is True.
    Settings that were saved next to a model's weights then apply. A field that is None counts as
    not given.

    The help of the commands and docs/settings.md are made from these lines. The first sentence of a
    setting is its help.

    Attributes:
        keep: share of the keys to keep, above 0 to 1; lower is faster and less exact. Keys and
            values of an image merge at the attention call, and the merged values are fitted to a
            few exact queries. In vision transformers it is the share of the tokens.
        tau: similarity above which whole tokens merge (the paper's method); lower merges more. The
            cosine ranges from -1 to 1, where 1 merges nothing. Give `tau` or `keep`, not both.
        mlp_keep: share of the tokens on which each MLP is computed, above 0 to 1; 1 computes all. A
            fit restores the MLP's output for all other tokens. Lower is faster and less exact.
            Denoisers support it, through `apply_mame`.
        block_keep: share of the tokens on which each block is computed, above 0 to 1; 1 computes
            all. Its queries, its MLP and its cross-attention are computed for these tokens, with
            the keys of all tokens. A fit restores the change that the block makes to all other
            tokens. Denoisers support it, through `apply_mame`.
        min_tokens: smallest number of tokens of a layer that merges; by default, the kernel
            decides. With a fused attention kernel it is 1,024 on a CPU, 4,096 on MPS, 16,384 on
            GPUs and 24,576 from compute capability 9 on; with the unfused kernel it is 576, 1,024,
            4,096 and 8,192. With `MaMeAttnProcessor` on a video model it must be above the number
            of frames.
        fit_queries: number of queries that merged values are fitted to; 0 leaves values as means.
            More queries are more exact and slower. By default, one query for 32 tokens, from 64 to
            256.
        tile_size: side of the square tiles in which keys are compared; 0 compares all keys. A tile
            has at least 2 tokens a side.
        redraw: whether each step draws other destinations and queries. Errors of the steps then do
            not add up. It needs `apply_mame`, which reads the timestep.
        share_guidance_plan: whether guided and unguided samples merge the same keys. Otherwise
            guidance would multiply what merging does to one sample but not to the other. The two
            samples may share a batch, or be two calls of one input. It needs `apply_mame`, which
            reads both.
        equal_text: whether equal text tokens at the end of a prompt are computed as one, on a CPU.
            This changes an image by rounding alone. Stable Diffusion 3 has 256 such tokens without
            its T5 encoder. It needs `apply_mame`.
        seed: seed of the random draws. Draws have their own generator, never the global one.
        references: share of each reference image's keys to keep; by default a quarter. If `keep` is
            given, the default keeps all. Above 0 to 1; 1 leaves references as they are. Each
            reference merges, and its MLPs are restored, on its own grid. Models for edits support
            it, through `apply_mame`.
        size: latent height and width, for layers that don't know them. `MaMeAttnProcessor` and
            single attention modules need it. Models read it from their input and reject a different
            value.
        layers: settings of single layers by patterns of their names. They override the settings of
            all layers: `{'blocks.[24]': {'keep': 0.5}}`. False leaves a layer unmerged.
            Self-attention supports them, through `apply_mame`.
        calibrated_for: model that the settings were found for; other models refuse them.
            Calibration writes it.

    Raises:
        ValueError: a value is not allowed. The message names the field, the allowed values and the
            given value.
    """

    keep: float | None = _setting(None, _share)
    tau: float | None = _setting(None, _cosine)
    mlp_keep: float | None = _setting(None, _share, keys_only=True)
    block_keep: float | None = _setting(None, _share, keys_only=True)
    min_tokens: int | None = _setting(None, _whole(1))
    fit_queries: int | None = _setting(None, _whole(0), keys_only=True)
    tile_size: int = _setting(16, _side, keys_only=True)
    redraw: bool = _setting(True, _flag, keys_only=True)
    share_guidance_plan: bool = _setting(True, _flag, keys_only=True)
    equal_text: bool = _setting(True, _flag, keys_only=True)
    seed: int = _setting(0, _whole(0))
    references: float | None = _setting(None, _share, keys_only=True)
    size: tuple[int, int] | None = _setting(None, _size)
    layers: LayerRules | None = _setting(None, LayerRules)  # noqa: RUF009
    calibrated_for: str | None = _setting(None, _text)
    is_default: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in _SETTINGS:
            object.__setattr__(self, name, checked(name, getattr(self, name)))
        if self.tau is not None and self.keep is not None:
            raise ValueError(
                f"expected tau or keep, got both (tau={self.tau!r}, keep={self.keep!r}); drop one"
            )
        object.__setattr__(self, "is_default", self.tau is None and self.keep is None)
        if self.is_default:
            object.__setattr__(self, "keep", DEFAULT_KEEP)
        for name in self.given:
            if self.tau is not None and _SETTINGS[name].metadata["keys_only"]:
                raise ValueError(
                    f"{name}: goes with keep, got {name}={getattr(self, name)!r} together with tau;"
                    " leave it out, or give keep"
                )
        for pattern, rule in (self.layers or {}).items():
            self._with_rule(rule, pattern)

    @property
    def method(self) -> Method:
        """Return "keys" if keys and values merge (`keep`), "tokens" if whole tokens do (`tau`)."""
        return "keys" if self.tau is None else "tokens"

    @property
    def mlp_share(self) -> float:
        """Return the share of the tokens on which MLPs are computed, 1 if none is restored."""
        alone = self.is_default and self.layers is None and self.block_keep is None
        if self.mlp_keep is None and alone:
            return DEFAULT_MLP_KEEP
        return 1.0 if self.mlp_keep is None else self.mlp_keep

    @property
    def block_share(self) -> float:
        """Return the share of the tokens on which blocks are computed, 1 if none is restored."""
        return 1.0 if self.block_keep is None else self.block_keep

    @property
    def reference_share(self) -> float | None:
        """Return the share of a reference image's keys to keep, or None if they don't merge."""
        share = self.references
        if share is None and self.is_default:
            share = DEFAULT_REFERENCES
        return None if share == 1 else share

    @property
    def given(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, by name."""
        return {
            name: getattr(self, name)
            for name, f in _SETTINGS.items()
            if getattr(self, name) != f.default and not (name == "keep" and self.is_default)
        }

    def replace(self, **changes: Any) -> MaMeConfig:
        """Return this config with `changes`. None resets a field to its default.

        A new tau drops keep, and a new keep drops tau, with the settings that only the dropped
        method has.
        """
        if not changes:
            return self
        for name, other in (("tau", "keep"), ("keep", "tau")):
            if changes.get(name) is not None and name not in self.given:
                changes = {other: None, **changes}
        method = "keys" if {**self.given, **changes}.get("tau") is None else "tokens"
        kept = {
            name: value
            for name, value in self.given.items()
            if method == self.method or not _SETTINGS[name].metadata["keys_only"]
        }
        return MaMeConfig.from_dict({**kept, **changes})

    __replace__ = replace

    def of_layer(self, name: str) -> MaMeConfig | None:
        """Return the settings of a self-attention by its name in a report.

        The result is None if `layers` leaves it unmerged.

        >>> rules = {"blocks.*": {"keep": 0.125}, "blocks.[24]": {"keep": 0.5}, "blocks.5": False}
        >>> config = MaMeConfig(layers=rules)
        >>> config.of_layer("blocks.1.attn").keep, config.of_layer("blocks.4.attn").keep
        (0.125, 0.5)
        >>> config.of_layer("blocks.5.attn"), config.of_layer("last").keep
        (None, 0.25)
        """
        if self.layers is None:
            return self
        base = self.replace(layers=None)
        config: MaMeConfig | None = base
        for pattern, rule in self.layers.items():
            if means(pattern, name):
                config = (config or base)._with_rule(rule, name)
        if config is not None and config.is_default and config.mlp_keep is None:
            return config.replace(mlp_keep=1)  # without layers it would be the default's
        return config

    def _with_rule(self, rule: Mapping[str, Any] | Literal[False], of: str) -> MaMeConfig | None:
        """Return these settings overridden by a rule, or None if the rule leaves layers unmerged.

        Raises:
            ValueError: a setting is wrong. The message names `of`, which the rule applies to.
        """
        if rule is False:
            return None
        try:
            return self.replace(**{"layers": None, **rule})
        except (TypeError, ValueError) as error:
            raise ValueError(f"layers: {of}: {error}") from None

    def to_dict(self, given_only: bool = False) -> dict[str, Any]:
        """Return the fields as JSON values, which `from_dict` accepts.

        If `given_only`, only fields that differ from their defaults are returned.
        """
        values = self.given if given_only else {name: getattr(self, name) for name in _SETTINGS}
        if self.is_default and not given_only:
            values["keep"] = None
        return {name: _json(value) for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MaMeConfig:
        """Make a config from `values` by field name. Old names of fields are accepted.

        Raises:
            ValueError: a name is no setting, or a value is not allowed.
        """
        values = {_OLD_NAMES.get(name, name): value for name, value in values.items()}
        check_names(values)
        return cls(**values)

    @classmethod
    def from_text(cls, text: str) -> MaMeConfig:
        """Make a config from fields as a command line has them; an empty text gives the default.

        >>> MaMeConfig.from_text("keep=0.5,redraw=false").given
        {'keep': 0.5, 'redraw': False}

        Raises:
            ValueError: a part has no value, a name is no setting, or a value is not allowed.
        """
        values: dict[str, Any] = {}
        for part in text.split(",") if text else ():
            name, equals, value = part.strip().partition("=")
            if not equals:
                raise ValueError(f"expected settings such as keep=0.4,fit_queries=32, got {part!r}")
            values[name] = _value(value)
        return cls.from_dict(values)

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> MaMeConfig:
        """Read a config from a .json file with fields at its top level.

        The entry `about`, which may describe how the settings were found, is ignored.

        Raises:
            ValueError: the file can't be read or parsed, or its settings are wrong. The message
                names the file.
        """
        values = read_object(Path(path), 'settings such as {"keep": 0.5}')
        values.pop("about", None)
        try:
            return cls.from_dict(values)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from None


def _documented() -> dict[str, Field[Any]]:
    """Return the settings by name, with the class's description of each in its metadata."""
    texts = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", getdoc(MaMeConfig) or "", re.M))
    settings = {f.name: f for f in fields(MaMeConfig) if f.init}
    for name, f in settings.items():
        help, _, about = " ".join(texts.get(name, "").split()).partition(". ")
        f.metadata = MappingProxyType({**f.metadata, "help": help.rstrip("."), "about": about})
    return settings


_SETTINGS = _documented()
ConfigOrFile = MaMeConfig | str | PathLike[str] | None
_OLD_NAMES = {"made_for": "calibrated_for"}  # in files of settings
NAMES = tuple(_SETTINGS)


def checked(name: str, value: Any) -> Any:
    """Return a setting's value as a config stores it, or its default for None.

    Raises:
        ValueError: no config accepts the value. The message names the setting.
    """
    f = _SETTINGS[name]
    try:
        return f.default if value is None else f.metadata["check"](value)
    except ValueError as error:
        if name == "layers":  # messages of LayerRules name the setting already
            raise
        raise ValueError(f"{name}: {error}, got {value!r}") from None


def read_config(config: ConfigOrFile) -> MaMeConfig | None:
    """Return settings, read from a file if `config` is a path. None stays None.

    Raises:
        TypeError: `config` is something else.
        ValueError: as for `MaMeConfig.from_file`.
    """
    if isinstance(config, (str, PathLike)):
        return MaMeConfig.from_file(config)
    if config is not None and not isinstance(config, MaMeConfig):
        raise TypeError(
            f"config: expected a MaMeConfig or a file of settings, got {config!r}; write"
            " MaMeConfig(keep=0.25) or keep=0.25"
        )
    return config


def _value(text: str) -> Any:
    """Return the value that a text means: True, False, a number, or the text."""
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def check_names(values: Mapping[str, Any]) -> None:
    """Raise ValueError if a name in `values` is no setting."""
    for name in values:
        if name not in NAMES:
            near = difflib.get_close_matches(str(name), NAMES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown setting {name!r}{hint} (settings are {', '.join(NAMES)})")


def _json(value: Any) -> Any:
    """Convert a field's value to a JSON value."""
    if isinstance(value, LayerRules):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
