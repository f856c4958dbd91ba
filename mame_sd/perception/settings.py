"""Which block merges how: `blocks`, one tau or keep for all or one for each, and the defaults of
perception.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

from mame_sd.config import MaMeConfig
from mame_sd.layer_rules import LayerRules

MIN_TOKENS = 2  # of a block that merges
LEFT = 0.25  # share of the patches that the last block leaves, where there are blocks enough
SCHEDULES = ("decreasing", "constant")
# which blocks merge, from the first: every second one keeps as much as all do, for half of the
# merges
EVERY = 2
FEWEST = 0.01  # share that a schedule asks of a block at least
LEAST = 0.5  # of the tokens of one block: its destinations, where they are no grid
_NO_MEANING = {
    "fit_queries": "an encoder's tokens merge, not its keys alone",
    "tile_size": "all of an image's patches are compared",
    "redraw": "an encoder has no steps",
    "share_guidance_plan": "an encoder has no guidance",
    "size": "the size of its images is read off",
    "references": "an encoder sees one image",
    "layers": "which blocks merge is decided when merging is applied; give it to apply_mame",
    "made_for": "give it to apply_mame",
}


def chosen_blocks(
    blocks: int | Iterable[int] | None, depth: int, every: int = 1
) -> tuple[int, ...]:
    """The blocks of `depth` that merge, ascending, counted from 0: every `every`-th, the first
    ones, or those that are named (negative ones count from the end).
    """
    if blocks is None:
        return tuple(range(0, depth, every))
    if isinstance(blocks, int) and not isinstance(blocks, bool):
        if not 1 <= blocks <= depth:
            raise ValueError(
                f"blocks: expected how many of the {depth} blocks merge, from 1 to {depth}, got"
                f" {blocks}"
            )
        return tuple(range(blocks))
    try:
        given = [] if isinstance(blocks, Mapping) else [*blocks]  # type: ignore[misc]
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
    """Whether blocks merge as the paper has it, by `tau`."""
    given = {**(config.given if isinstance(config, MaMeConfig) else {}), **_said(fields)}
    keep = fields.get("keep") if fields.get("tau") is None else None
    return keep is None and given.get("tau") is not None


def _one_each(value: Any) -> bool:
    """Whether a field was given as one number for each block."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def _said(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not None, which leaves a field as it is."""
    return {name: value for name, value in fields.items() if value is not None}


def shares(keep: float, count: int, schedule: str) -> list[float]:
    """The shares of their tokens that `count` blocks keep, `keep` in the mean, by `schedule`.

    In a decreasing one the share that merges falls as the square root of how many blocks are still
    to merge.

    >>> [round(share, 2) for share in shares(0.8, 6, "decreasing")], shares(0.8, 2, "constant")
    ([0.73, 0.75, 0.78, 0.81, 0.84, 0.89], [0.8, 0.8])
    """
    if schedule == "constant":
        return [keep] * count
    falling = [((count - place) / count) ** 0.5 for place in range(count)]
    mean = sum(falling) / count
    return [max(1 - (1 - keep) * one / mean, FEWEST) for one in falling]


def mean_share(count: int, schedule: str) -> float:
    """The mean share of their tokens that `count` blocks keep by default: so that the last one
    leaves `LEFT` of the patches.

    It is at least `LEAST`.
    """
    low, high = LEAST, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if math.prod(shares(middle, count, schedule)) > LEFT else (middle, high)
        )
    return low


def schedule_of(schedule: str | None, config: MaMeConfig | None, fields: Mapping[str, Any]) -> str:
    """The schedule in force: `schedule` where it is given, else constant in the paper's form and
    decreasing in ours. Raises ValueError beside shares that say it already or a threshold.
    """
    if schedule is None:
        return "constant" if is_paper(config, fields) else "decreasing"
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected 'decreasing' or 'constant', got {schedule!r}")
    given = {**({} if config is None else config.given), **_said(fields)}
    if given.get("tau") is not None or _one_each(given.get("keep")):
        raise ValueError(
            "schedule: expected keep as one number, or none, beside it; leave the schedule out"
        )
    return schedule


def configs_of(
    config: MaMeConfig | None,
    fields: Mapping[str, Any],
    blocks: Iterable[int],
    schedule: str = "decreasing",
) -> dict[int, MaMeConfig]:
    """The settings of each block: those of `config` that were given, over the defaults of
    perception, with `fields` over both.

    Where neither `tau` nor `keep` is given, the blocks keep `mean_share`.

    Args:
        config: the settings that were given as one object.
        fields: those that were given by name.
        blocks: that merge.
        schedule: how one `keep` is shared out over the blocks.

    Raises:
        TypeError: `config` is no MaMeConfig.
        ValueError: as `changed`.
    """
    if config is not None and not isinstance(config, MaMeConfig):
        raise TypeError(
            f"config: expected a MaMeConfig, got {config!r}; write MaMeConfig(tau=0.8) or tau=0.8"
        )
    blocks = [*blocks]
    fields = _said(fields)
    given = {} if config is None else {**config.given}
    given.setdefault("min_tokens", MIN_TOKENS)
    if is_paper(config, fields):
        if _one_each(fields.get("tau")):  # the first stands in until each block has its own
            given["tau"] = fields["tau"][0] if fields["tau"] else None
        elif "tau" in fields:
            given["tau"] = fields["tau"]
        return changed(dict.fromkeys(blocks, MaMeConfig.from_dict(given)), fields, schedule)
    if not {"tau", "keep"} & {*given, *fields}:
        given["keep"] = mean_share(len(blocks), schedule)
    if given.get("keep") is not None and not {"tau", "keep"} & {*fields}:
        fields = {**fields, "keep": given.pop("keep")}
    return changed(dict.fromkeys(blocks, MaMeConfig.from_dict(given)), fields, schedule)


def changed(
    configs: Mapping[int, MaMeConfig], fields: Mapping[str, Any], schedule: str
) -> dict[int, MaMeConfig]:
    """The settings of each block with `fields` over them; `tau` and `keep` may be one number for
    each block, and one `keep` is shared out by `schedule`.

    Raises:
        ValueError: a field is unknown, out of its range or without meaning here, or not one for
            each block.
    """
    rows: list[dict[str, Any]] = [{} for _ in configs]
    for name, value in fields.items():
        if name == "keep" and type(value) in (float, int) and 0 < value <= 1:  # else refused below
            value = shares(value, len(rows), schedule)
        each = name in ("tau", "keep") and _one_each(value)
        if each and len(value) != len(rows):
            raise ValueError(
                f"{name}: expected one number, or one for each of {len(rows)} blocks, got"
                f" {len(value)}: {value!r}"
            )
        for row, one in zip(rows, value if each else [value] * len(rows), strict=True):
            row[name] = one
    made = {
        block: old.replace(**row) for (block, old), row in zip(configs.items(), rows, strict=True)
    }
    check_meaning(made.values())
    return made


def check_meaning(configs: Iterable[MaMeConfig]) -> None:
    """Raises ValueError for settings that have no meaning in a vision transformer."""
    for new in configs:
        for name, reason in _NO_MEANING.items():
            if name in new.given:
                raise ValueError(
                    f"{name}: expected none for a vision transformer, got {new.given[name]!r}:"
                    f" {reason}"
                )


OF_ALL = ("layers", "made_for")


def taken(
    config: MaMeConfig | None, fields: dict[str, Any]
) -> tuple[MaMeConfig | None, dict[str, Any], dict[str, Any]]:
    """The settings without those of single blocks, and these: `layers` and `made_for`, where they
    are given.
    """
    given: dict[str, Any] = {}
    if isinstance(config, MaMeConfig):
        given = {name: config.given[name] for name in OF_ALL if name in config.given}
        config = config.replace(**dict.fromkeys(given)) if given else config
    given |= {name: fields[name] for name in OF_ALL if fields.get(name) is not None}
    return config, {name: value for name, value in fields.items() if name not in OF_ALL}, given


def without_shares(config: MaMeConfig | None, fields: Mapping[str, Any]) -> MaMeConfig:
    """The settings beside `tau` and `keep`."""
    config = MaMeConfig() if config is None else config
    rest = {name: value for name, value in fields.items() if name not in ("tau", "keep")}
    return config.replace(**rest, **{n: None for n in ("tau", "keep") if n in config.given})


def check_made_for(made_for: str | None, described: str) -> None:
    """Raises ValueError for settings that were found for another model."""
    if made_for not in (None, described):
        raise ValueError(
            f"made_for: expected settings that were found for {described}, got ones for"
            f" {made_for}; calibrate this model, or take another file"
        )


def ruled(
    configs: Mapping[int, MaMeConfig], rules: Any, names: Sequence[str]
) -> dict[int, MaMeConfig]:
    """The settings of the blocks that merge: `configs` (by number) under `rules`, by patterns of
    `names`. A block that a rule gives settings merges; False leaves one unmerged.

    Raises:
        ValueError: a pattern that means no block, a setting that can't be, or no block that merges.
    """
    rules = rules if isinstance(rules, LayerRules) else LayerRules(rules)
    unknown = rules.unknown(names)
    if unknown:
        raise ValueError(
            f"layers: expected patterns of blocks such as {names[0]!r}, got {unknown[0]!r}, which"
            " is none of them; handle.report() names them all"
        )
    base = next(iter(configs.values()))
    found: dict[int, MaMeConfig] = {}
    for number, name in enumerate(names):
        rule, own = rules.of(name), configs.get(number)
        if isinstance(rule, dict):
            try:
                own = (own or base).replace(**rule)
            except (TypeError, ValueError) as error:
                raise ValueError(f"layers: {name}: {error}") from None
        if rule is not False and own is not None:
            found[number] = own
    if not found:
        raise ValueError("layers: expected a block that merges, got none; leave one in")
    return found
