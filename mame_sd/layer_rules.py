"""Settings of single layers, by patterns of their names.

A pattern is a shell's (`*`, `?`, `[24]`). It means a layer where it matches the layer's name, as
`handle.report()` gives it. A part of the name from the left that ends before a dot will do, too:

>>> quarter, half = {"keep": 0.25}, {"keep": 0.5}
>>> rules = LayerRules({"blocks.*": quarter, "blocks.[24]": half, "blocks.5": False})
>>> [rules.of(name) for name in ("blocks.1.attn", "blocks.4.attn", "blocks.5.attn", "last")]
[{'keep': 0.25}, {'keep': 0.5}, False, None]

Where several patterns match, a later one goes before an earlier one, setting by setting.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

# What a model's call decides on, for all of its layers at once.
OF_THE_MODEL = ("redraw", "share_guidance_plan", "size", "layers", "made_for")
COMPILED = "_orig_mod."  # what torch.compile puts before the names of a model's layers


class LayerRules(Mapping[str, Any]):
    """Fields of MaMeConfig by pattern, or a list of such pairs; False leaves a layer unmerged.

    It never changes, and can be hashed.

    Raises:
        ValueError: no mapping of patterns, a value that is none of settings, or a setting that no
            layer has of its own. What the settings may be is checked where a config is made of
            them.
    """

    def __init__(self, rules: Any) -> None:
        listed = isinstance(rules, (list, tuple)) and len(rules) > 0
        if listed and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in rules):
            pairs = list(rules)  # as files hold them that sort what they write
        elif isinstance(rules, Mapping):
            pairs = list(rules.items())
        else:
            raise ValueError(
                'layers: expected settings by pattern such as {"blocks.[24]": {"keep": 0.5}},'
                f" got {rules!r}"
            )
        self._rules: dict[str, dict[str, Any] | bool] = {}
        for pattern, rule in pairs:
            if not isinstance(pattern, str) or not pattern:
                raise ValueError(f"layers: expected a pattern of a layer's name, got {pattern!r}")
            if rule is not False and not isinstance(rule, Mapping):
                raise ValueError(
                    f'layers: {pattern}: expected settings such as {{"keep": 0.5}}, or False to'
                    f" leave it unmerged, got {rule!r}"
                )
            for name in rule or ():
                if name in OF_THE_MODEL:
                    raise ValueError(
                        f"layers: {pattern}: {name} holds for a whole model, not for one layer;"
                        " give it beside layers"
                    )
            self._rules[pattern] = False if rule is False else dict(rule)

    def __getitem__(self, pattern: str) -> dict[str, Any] | bool:
        rule = self._rules[pattern]
        return dict(rule) if isinstance(rule, dict) else rule

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerRules) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return repr(self._rules)

    def of(self, layer: str) -> dict[str, Any] | bool | None:
        """The settings of a layer; False: it stays unmerged; None: no pattern means it."""
        found: dict[str, Any] | bool | None = None
        for pattern, rule in self._rules.items():
            if means(pattern, layer):
                both = isinstance(rule, dict) and isinstance(found, dict)
                found = {**_without(found, rule), **rule} if both else self[pattern]  # type: ignore[arg-type,dict-item]
        return found

    def unknown(self, layers: Iterable[str]) -> list[str]:
        """The patterns that mean none of `layers`."""
        names = list(layers)
        return [
            pattern for pattern in self._rules if not any(means(pattern, name) for name in names)
        ]

    def to_dict(self) -> dict[str, Any]:
        """The rules as JSON values."""
        return {
            pattern: (
                rule
                if isinstance(rule, bool)
                else {
                    name: list(value) if isinstance(value, tuple) else value
                    for name, value in rule.items()
                }
            )
            for pattern, rule in self._rules.items()
        }

    def _key(self) -> str:
        # Later rules go before earlier ones, so their order counts; that of fields doesn't.
        rules = self.to_dict().items()
        return json.dumps([(p, r if isinstance(r, bool) else sorted(r.items())) for p, r in rules])


def means(pattern: str, layer: str) -> bool:
    """Whether `pattern` means the layer of that name."""
    parts = layer.removeprefix(COMPILED).split(".")
    return any(fnmatchcase(name, pattern) for name in accumulate(parts, "{}.{}".format))


def _without(found: dict[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """What stays of `found`: a tau drops a keep, and a keep a tau."""
    dropped = {
        other for name, other in (("tau", "keep"), ("keep", "tau")) if later.get(name) is not None
    }
    return {name: value for name, value in found.items() if name not in dropped}
