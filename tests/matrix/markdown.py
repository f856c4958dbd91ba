"""What the tables of the page have in common, and lists for reasons too long for a cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from textwrap import wrap

WIDTH = 100


def layers(merges: Mapping[str, int] | Mapping[int, int]) -> str:
    """How many layers merge, by their number of tokens."""
    return ", ".join(f"{n} of {tokens}" for tokens, n in merges.items()) or "none"


def bullet(text: str, indent: str = "") -> list[str]:
    """A point of a list."""
    return wrap(
        text,
        WIDTH,
        initial_indent=f"{indent}- ",
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def names_by_reason(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """A list of reasons, below each the names it holds for, from pairs of the two."""
    held: dict[str, list[str]] = {}
    for reason, name in pairs:
        held.setdefault(reason, []).append(name)
    return [
        line
        for reason, names in held.items()
        for line in (*bullet(reason), *bullet(", ".join(names), "  "))
    ]
