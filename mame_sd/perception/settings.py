"""Choose which blocks merge, and the settings of each block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

from mame_sd.config import MaMeConfig

LEFT = 0.25  # share of the patches that the last block leaves, if there are enough blocks
# By default the first block doesn't merge: at equal FLOPs outputs are as near on photographs, and
# far nearer on uniform textures.
FIRST = 1
FEWEST = 0.01  # lowest share that a block keeps
LEAST = 0.5  # lowest mean share: the destinations of a block whose tokens are no grid
FIELDS = ("keep", "tau")  # the fields of MaMeConfig that vision transformers have


def chosen_blocks(
    blocks: int | Iterable[int] | None, depth: int, first: int = 0
) -> tuple[int, ...]:
    """Return the indices of the merging blocks in ascending order.

    Args:
        blocks: how many blocks merge from the first on, or their indices (negative ones count from
            the end). If None, all blocks from `first` on.
        depth: number of blocks of the model.
        first: first merging block of the default, if there are more blocks.
    """
    if blocks is None:
        return tuple(range(min(first, depth - 1), depth))
    if isinstance(blocks, int) and blocks is not True and 1 <= blocks <= depth:
        return tuple(range(blocks))
    try:
        numbers = [] if isinstance(blocks, Mapping | int) else [*blocks]
        indices = {index(block) % depth for block in numbers if -depth <= block < depth}
    except TypeError:
        indices = set()
    if not indices or len(indices) < len(numbers) or any(isinstance(n, bool) for n in numbers):
        raise ValueError(
            f"blocks: expected how many of the {depth} blocks merge, or different numbers from 0 to"
            f" {depth - 1}, got {blocks!r}"
        )
    return tuple(sorted(indices))


def is_paper(config: MaMeConfig | None, fields: Mapping[str, Any]) -> bool:
    """Return True if these settings choose the paper's method (`tau`)."""
    if fields.get("tau") is not None or fields.get("keep") is not None:
        return fields.get("tau") is not None
    return config is not None and config.tau is not None


def shares(keep: float, count: int) -> list[float]:
    """Spread `keep`, the mean share of tokens, over `count` blocks.

    The merged share falls with the square root of the number of blocks that are still to merge. No
    block keeps less than `FEWEST`, which may raise the mean above `keep`.

    >>> [round(share, 2) for share in shares(0.8, 6)]
    [0.73, 0.75, 0.78, 0.81, 0.84, 0.89]
    """
    falling = [((count - place) / count) ** 0.5 for place in range(count)]
    mean = sum(falling) / count
    return [max(1 - (1 - keep) * one / mean, FEWEST) for one in falling]


def mean_share(count: int) -> float:
    """Return the default mean share of tokens that `count` blocks keep, at least `LEAST`.

    It is the share for which the last block leaves `LEFT` of the patches.
    """
    low, high = LEAST, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if math.prod(shares(middle, count)) > LEFT else (middle, high)
    return low


def configs_of(
    config: MaMeConfig | None, fields: Mapping[str, Any], blocks: Iterable[int]
) -> dict[int, MaMeConfig]:
    """Return the settings of each block: `fields` over `config` over the defaults for encoders.

    Args:
        config: settings given as one object; only the fields that were set explicitly count.
        fields: settings given by name. If neither has `tau` or `keep`, blocks keep `mean_share`.
        blocks: indices of the merging blocks.
    """
    blocks, base = [*blocks], MaMeConfig() if config is None else config
    if fields.get("tau") is None and fields.get("keep") is None and base.tau is None:
        fields = {**fields, "keep": mean_share(len(blocks)) if base.is_default else base.keep}
    return changed(dict.fromkeys(blocks, base), fields)


def changed(configs: Mapping[int, MaMeConfig], fields: Mapping[str, Any]) -> dict[int, MaMeConfig]:
    """Return the settings of each block with `fields` over them.

    Args:
        configs: settings by block index.
        fields: new values; None changes nothing. `tau` and `keep` may hold one number for each
            block; one `keep` is spread by `shares`.

    Raises:
        ValueError: a field is unknown, out of range, meaningless here, or has the wrong number
            of values.
    """
    rows: list[dict[str, Any]] = [{} for _ in configs]
    for name, value in fields.items():
        if name == "keep" and type(value) in (float, int) and 0 < value <= 1:  # else refused below
            value = shares(value, len(rows))
        each = name in ("tau", "keep") and isinstance(value, Sequence) and type(value) is not str
        if each and len(value) != len(rows):
            raise ValueError(
                f"{name}: expected one number, or one for each of {len(rows)} blocks, got"
                f" {len(value)}: {value!r}"
            )
        for row, one in zip(rows, value if each else [value] * len(rows), strict=True):
            if one is not None:
                row[name] = one
    made = {
        block: old.replace(**row) for (block, old), row in zip(configs.items(), rows, strict=True)
    }
    meaningless = {name: v for new in made.values() for name, v in new.given.items()}
    for name in meaningless.keys() - {*FIELDS}:
        raise ValueError(
            f"{name}: expected none for a vision transformer, got {meaningless[name]!r}; it has"
            f" {', '.join(FIELDS)}, blocks, restore and prop_attn"
        )
    return made
