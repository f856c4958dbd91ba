"""Which block merges how: `blocks`, one tau or keep for all or one for each, and the defaults of
perception.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

from mame_sd.config import MaMeConfig

MIN_TOKENS = 2  # of a block that merges
LEFT = 0.25  # share of the patches that the last block leaves, where there are blocks enough
# which blocks merge, from the first: every second one keeps as much as all do, for half of the
# merges
EVERY = 2
FEWEST = 0.01  # share that is asked of a block at least
LEAST = 0.5  # of the tokens of one block: its destinations, where they are no grid
_NO_MEANING = {
    "mlp_keep": "an encoder's tokens merge, and all that is left go through its MLPs",
    "block_keep": "an encoder's tokens merge, and all that is left go through its blocks",
    "fit_queries": "an encoder's tokens merge, not its keys alone",
    "tile_size": "all of an image's patches are compared",
    "redraw": "an encoder has no steps",
    "share_guidance_plan": "an encoder has no guidance",
    "size": "the size of its images is read off",
    "references": "an encoder sees one image",
    "layers": "say which blocks merge by blocks=, and give keep or tau a number for each",
    "made_for": "a denoiser has one",
}


def chosen_blocks(
    blocks: int | Iterable[int] | None, depth: int, every: int = 1
) -> tuple[int, ...]:
    """Choose the blocks of `depth` that merge, ascending, counted from 0: every `every`-th, the
    first ones, or those that are named (negative ones count from the end).
    """
    if blocks is None:
        return tuple(range(0, depth, every))
    if isinstance(blocks, int):
        if blocks is True or not 1 <= blocks <= depth:
            raise ValueError(
                f"blocks: expected how many of the {depth} blocks merge, from 1 to {depth}, got"
                f" {blocks}"
            )
        return tuple(range(blocks))
    try:
        given = [] if isinstance(blocks, Mapping) else [*blocks]
        named = [index(block) for block in given if not isinstance(block, bool)]
    except TypeError:
        raise ValueError(
            f"blocks: expected a number or numbers of blocks counted from 0, got {blocks!r}"
        ) from None
    found = sorted({block % depth for block in named if -depth <= block < depth})
    if not found or len(found) < len(given):
        raise ValueError(f"blocks: expected different ones from 0 to {depth - 1}, got {blocks!r}")
    return tuple(found)


def is_paper(config: MaMeConfig | None, fields: Mapping[str, Any]) -> bool:
    """Tell whether blocks merge as the paper has it, by `tau`."""
    if fields.get("tau") is not None or fields.get("keep") is not None:
        return fields.get("tau") is not None
    return config is not None and config.tau is not None


def shares(keep: float, count: int) -> list[float]:
    """Spread `keep`, the mean share of tokens, over `count` blocks. The share that merges falls as
    the square root of how many blocks are still to merge.

    >>> [round(share, 2) for share in shares(0.8, 6)]
    [0.73, 0.75, 0.78, 0.81, 0.84, 0.89]
    """
    falling = [((count - place) / count) ** 0.5 for place in range(count)]
    mean = sum(falling) / count
    return [max(1 - (1 - keep) * one / mean, FEWEST) for one in falling]


def mean_share(count: int) -> float:
    """Find the mean share of their tokens that `count` blocks keep by default: so that the last one
    leaves `LEFT` of the patches.

    It is at least `LEAST`.
    """
    low, high = LEAST, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if math.prod(shares(middle, count)) > LEFT else (middle, high)
    return low


def configs_of(
    config: MaMeConfig | None, fields: Mapping[str, Any], blocks: Iterable[int]
) -> dict[int, MaMeConfig]:
    """Make the settings of each block: those of `config` that were given, over the defaults of
    perception, with `fields` over both.

    Where neither `tau` nor `keep` is given, the blocks keep `mean_share`.

    Args:
        config: the settings that were given as one object.
        fields: those that were given by name.
        blocks: that merge.

    Raises:
        ValueError: as `changed`.
    """
    blocks, base = [*blocks], MaMeConfig() if config is None else config
    base = base.replace(min_tokens=base.min_tokens or MIN_TOKENS)
    if fields.get("tau") is None and fields.get("keep") is None and base.tau is None:
        fields = {**fields, "keep": mean_share(len(blocks)) if base.is_open else base.keep}
    return changed(dict.fromkeys(blocks, base), fields)


def changed(configs: Mapping[int, MaMeConfig], fields: Mapping[str, Any]) -> dict[int, MaMeConfig]:
    """Put `fields` over the settings of each block; one that is None is left as it is. `tau` and
    `keep` may be one number for each block, and one `keep` is shared out by `shares`.

    Raises:
        ValueError: a field is unknown, out of its range or without meaning here, or not one for
            each block.
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
    for new in made.values():
        for name, reason in _NO_MEANING.items():
            if name in new.given:
                raise ValueError(
                    f"{name}: expected none for a vision transformer, got {new.given[name]!r}:"
                    f" {reason}"
                )
    return made
