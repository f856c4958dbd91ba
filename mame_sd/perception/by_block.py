"""Settings of single blocks by patterns of their names: `layers`, as for diffusion models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mame_sd.config import MaMeConfig
from mame_sd.layer_rules import LayerRules

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
    """The settings of the blocks that merge, after those of single blocks.

    A block that a rule gives settings merges; False leaves one unmerged.

    Args:
        configs: of those that would merge without rules, by number.
        rules: LayerRules or what it takes.
        names: of all blocks, as a report has them.

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
