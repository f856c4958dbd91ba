"""Hold settings of single layers, by patterns of their names.

A pattern has the syntax of a shell's (`*`, `?`, `[24]`). It applies to a layer if it matches the
layer's name in `handle.report()`, or the beginning of that name up to a dot. If several patterns
match, a later one overrides an earlier one, setting by setting (`MaMeConfig.of_layer`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

# Settings that apply to all layers of a model.
OF_THE_MODEL = ("redraw", "share_guidance_plan", "size", "layers", "calibrated_for")
MAX_PATTERNS = 1_000  # each layer is compared with all patterns
COMPILED = "_orig_mod."  # prefix of layers' names under torch.compile


class LayerRules(Mapping[str, Any]):
    """Fields of MaMeConfig by pattern. False leaves a layer unmerged.

    Rules are immutable and hashable. Their order matters.

    Args:
        rules: fields by pattern.

    Raises:
        ValueError: `rules` is no mapping of patterns, a value is neither settings nor False, or a
            setting applies to whole models only. Values of settings are checked when a config is
            made.
    """

    def __init__(self, rules: Any) -> None:
        if not isinstance(rules, Mapping):
            raise ValueError(
                'layers: expected settings by pattern such as {"blocks.[24]": {"keep": 0.5}},'
                f" got {rules!r}"
            )
        if len(rules) > MAX_PATTERNS:
            raise ValueError(
                f"layers: expected at most {MAX_PATTERNS:,} patterns, got {len(rules):,}"
            )
        for pattern, rule in rules.items():
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
                        f"layers: {pattern}: {name} applies to the model, not to a layer;"
                        " give it next to layers"
                    )
        self._rules = tuple(
            (pattern, rule is not False and tuple(sorted(rule.items(), key=str)))
            for pattern, rule in rules.items()
        )

    def __getitem__(self, pattern: str) -> dict[str, Any] | bool:
        rule = dict(self._rules)[pattern]
        return rule is not False and dict(rule)

    def __iter__(self) -> Iterator[str]:
        return (pattern for pattern, _ in self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerRules) and self._rules == other._rules

    def __hash__(self) -> int:
        return hash(self._rules)

    def __repr__(self) -> str:
        return repr(dict(self))

    def unknown(self, layers: Iterable[str]) -> list[str]:
        """Return the patterns that match none of `layers`."""
        names = list(layers)
        return [pattern for pattern in self if not any(means(pattern, name) for name in names)]


def means(pattern: str, layer: str) -> bool:
    """Return True if `pattern` matches a layer's name, or its beginning up to a dot."""
    parts = layer.removeprefix(COMPILED).split(".")
    return any(fnmatchcase(name, pattern) for name in accumulate(parts, "{}.{}".format))
