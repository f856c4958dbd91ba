"""Format tables in Markdown, and choose their rows by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mame_sd.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method that a command measures.

    Attributes:
        name: name for --rows, which can be a file's name.
        label: label for tables.
        method: what it does. If None, nothing: the model as it is.
    """

    name: str
    label: str
    method: Any = None


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format cells as a table.

    >>> print(markdown_table(["row", "KL"], [["ours", ".003"]]))
    | row | KL |
    |---|---|
    | ours | .003 |
    """
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(heads)}", *lines[1:]])


def interval_cell(value: Mapping[str, Any]) -> str:
    """Format a mean from `eval.stats` with its interval, if it has one.

    >>> interval_cell({"mean": 0.0124, "low": 0.008, "high": 0.0151})
    '0.012 (0.008 to 0.015)'
    """
    mean, low, high = value["mean"], value["low"], value["high"]
    return f"{mean:.3f}" if low is None else f"{mean:.3f} ({low:.3f} to {high:.3f})"


def names_in(text: str) -> list[str]:
    """Return names separated by commas, each once; a superfluous comma gives an empty name.

    >>> names_in("b, a,b,")
    ['b', 'a', '']
    """
    return list(dict.fromkeys(name.strip() for name in text.split(",") if text.strip()))


def named(text: str | None, known: Mapping[str, T], flag: str = "--rows") -> dict[str, T]:
    """Return the entries of `known` that `text` names, separated by commas, each once.

    If `text` is None, return all entries. Raises UserError, which lists the names, for an unknown
    or empty one.

    >>> named("b,a", {"a": 1, "b": 2})
    {'b': 2, 'a': 1}
    """
    if text is None:
        return dict(known)
    names = names_in(text)
    for name in names or [""]:
        if name not in known:
            raise UserError(
                f"{flag}: expected names of {', '.join(known)}, got {name!r}; correct it"
            )
    return {name: known[name] for name in names}
