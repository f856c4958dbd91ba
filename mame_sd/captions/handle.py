"""CaptionHandle: what `apply_captioner` gives, to read, change, switch and remove merging."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from mame_sd.captions.calls import Calls, VisualCounts
from mame_sd.captions.on_model import on_model, put, take, tower_of
from mame_sd.captions.prompts import Image
from mame_sd.captions.towers import QWEN, images_behind, images_of, layer_of, name_of
from mame_sd.config import MaMeConfig
from mame_sd.perception.apply_encoder import encoder_restored, has_encoder_hooks
from mame_sd.perception.handle import EncoderHandle
from mame_sd.perception.known_encoders import find_encoder
from mame_sd.perception.report import EncoderReport
from mame_sd.perception.settings import (
    EVERY,
    LEAST,
    chosen_blocks,
    is_paper,
    schedule_of,
    shares,
)
from mame_sd.report import counted

KEEP = 0.25  # share of the visual tokens that stays by default


@dataclass(frozen=True)
class CaptionReport:
    """What merging did: means over the images since the last reset.

    Attributes:
        images: how many.
        visual_before: image tokens that the language model would have read.
        visual_after: those that it read.
        tower: the blocks of the vision tower; None where none of them merges.
    """

    images: int
    visual_before: float
    visual_after: float
    tower: EncoderReport | None

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        tower = None if self.tower is None else self.tower.to_dict()
        return {**asdict(self), "tower": tower}

    def __str__(self) -> str:
        share = self.visual_after / self.visual_before if self.visual_before else 1.0
        lines = [] if self.tower is None else [str(self.tower)]
        lines.append(
            f"{self.visual_before:.0f} -> {self.visual_after:.1f} visual tokens an image for the"
            f" language model ({share:.0%}), {counted(self.images, 'image')}"
        )
        return "\n".join(lines)


class MergeInTower:
    """Images whose patches merge in the blocks of the vision tower.

    Args:
        model: a LLaVA.
        config, blocks, prop_attn, schedule, fields: as `apply_captioner` has them.
    """

    def __init__(
        self,
        model: nn.Module,
        config: MaMeConfig | None,
        blocks: Any,
        prop_attn: bool | None,
        schedule: str | None,
        fields: dict[str, Any],
    ) -> None:
        self.model = model
        every = 1 if is_paper(config, fields) else EVERY
        self._blocks = chosen_blocks(blocks, layer_of(model), every)
        self._schedule = schedule_of(schedule, config, fields)
        config, fields = self._by_block(config, fields)
        tower: Any = model.get_submodule("model.vision_tower")
        self.tower = EncoderHandle(
            tower,
            config,
            self._blocks,
            fields,
            restore=None,
            prop_attn=prop_attn,
            schedule=schedule if "keep" not in fields else None,
        )
        self.tower.capture()
        with self._on():
            pass  # raises where another tool is in the way

    def __call__(self, call: dict[str, Any]) -> list[Image]:
        one = any(config.keep is None for config in self.tower.configs.values())
        with self._on():
            return images_of(self.model, self.tower, call, one)

    @property
    def config(self) -> MaMeConfig:
        """Of the first block that merges."""
        return self.tower.config

    def set(self, config: MaMeConfig | None, fields: dict[str, Any]) -> None:
        """Changes live settings."""
        config, fields = self._by_block(config, fields)
        with self._on():
            self.tower.set(config, **fields)

    @contextmanager
    def _on(self) -> Iterator[None]:
        """Hooks are on the tower for a call's images alone, one thread's at a time."""
        with tower_of(self.model).alone(), encoder_restored(self.tower.root):
            self.tower.install()
            yield

    def _by_block(
        self, config: MaMeConfig | None, fields: dict[str, Any]
    ) -> tuple[MaMeConfig | None, dict[str, Any]]:
        """One `keep` as shares of the blocks that leave so many of all tokens."""
        given = config.given if isinstance(config, MaMeConfig) else {}
        keep = fields.get("keep")
        if keep is None and fields.get("tau") is None:
            keep = given.get("keep")
        if not isinstance(keep, float | int) or not 0 < keep <= 1:
            return config, fields  # by tau, by default, one for each block; or refused later
        if given.get("keep") is not None:
            config = MaMeConfig.from_dict({k: v for k, v in given.items() if k != "keep"})
        return config, {**fields, "keep": left(float(keep), len(self._blocks), self._schedule)}


class MergeAfterTower:
    """Images whose patches merge behind the vision tower; arguments as `MergeInTower`.

    Attributes:
        config: the settings, of which `keep` and `tau` count.
        tower: None; no block of it merges.
    """

    tower: EncoderHandle | None = None

    def __init__(
        self,
        model: nn.Module,
        config: MaMeConfig | None,
        prop_attn: bool | None,
        schedule: str | None,
        fields: dict[str, Any],
    ) -> None:
        self.model = model
        if name_of(model) not in QWEN:
            layer_of(model)
            find_encoder(model.get_submodule("model.vision_tower"))
        _check_alone({"prop_attn": prop_attn, "schedule": schedule})
        self.config = MaMeConfig(keep=KEEP)
        self.set(config, fields)

    def __call__(self, call: dict[str, Any]) -> list[Image]:
        config = self.config
        with tower_of(self.model).many():
            return images_behind(self.model, call, config.keep, config.tau)

    def set(self, config: MaMeConfig | None, fields: dict[str, Any]) -> None:
        """Changes live settings."""
        if config is not None and not isinstance(config, MaMeConfig):
            raise TypeError(
                f"config: expected a MaMeConfig, got {config!r}; write MaMeConfig(keep=0.25) or"
                " keep=0.25"
            )
        fields = {name: value for name, value in fields.items() if value is not None}
        given = {**config.given} if config is not None else {}
        if {"keep", "tau"} & {*fields}:
            given = {name: value for name, value in given.items() if name not in ("keep", "tau")}
        asked = {**given, **fields}
        _check_alone({name: one for name, one in asked.items() if name not in ("keep", "tau")})
        if {"keep", "tau"} & {*asked}:
            self.config = MaMeConfig.from_dict(asked)


def _check_alone(fields: dict[str, Any]) -> None:
    """Raises ValueError for settings of blocks."""
    for name, value in fields.items():
        if value is not None:
            raise ValueError(
                f"{name}: expected keep or tau alone where tokens merge behind the tower, got"
                f" {value!r}; give blocks= to merge in the tower's blocks, or leave it out"
            )


class CaptionHandle:
    """Merging as applied to one LLaVA. Made by `apply_captioner`.

    Attributes:
        model: the LLaVA.
    """

    def __init__(self, model: nn.Module, images: MergeInTower | MergeAfterTower) -> None:
        self.model, self._images = model, images
        self._calls = Calls(model, images)

    @property
    def tower(self) -> EncoderHandle | None:
        """Merging on the vision tower's blocks; None where tokens merge behind it."""
        return self._images.tower

    @property
    def config(self) -> MaMeConfig:
        """The settings now in force; of the first block that merges, where blocks do."""
        return self._images.config

    @property
    def installed(self) -> bool:
        """Whether merging is on the model as this handle put it."""
        on = on_model(self.model)
        return on is not None and any(one.calls is self._calls for one in on.slots)

    @property
    def active(self) -> bool:
        """Whether tokens merge; False makes every call bit-equal to a model without merging."""
        return self._calls.active

    @active.setter
    def active(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"active: expected True or False, got {value!r}; give one of these")
        self._calls.active = value

    def set(self, config: MaMeConfig | None = None, **fields: Any) -> None:
        """Changes live settings from the next call on, as `EncoderHandle.set`; one `keep` is the
        share of the visual tokens that the language model gets.
        """
        self._images.set(config, fields)

    def report(self) -> CaptionReport:
        """Visual tokens and the tower's blocks since the last `reset`."""
        counts = self._calls.counts
        images = max(counts.images, 1)
        tower = None if self.tower is None else self.tower.report()
        return CaptionReport(counts.images, counts.unmerged / images, counts.kept / images, tower)

    def reset(self) -> None:
        """Sets all counters to zero."""
        if self.tower is not None:
            self.tower.reset()
        self._calls.counts = VisualCounts()

    def remove(self) -> None:
        """Takes this handle's merging off the model; that of a later one stays."""
        take(self._calls)

    def install(self) -> None:
        """Puts merging back after `remove`, or replaces that of a later handle.

        Raises:
            ValueError: another tool has replaced `forward` or `generate`, or the tower alone merges
                already.
        """
        with tower_of(self.model).many():
            if has_encoder_hooks(self.model):
                raise ValueError(
                    "expected a vision tower that merges nothing by itself, found merging on it;"
                    " call remove_mame on it first"
                )
        put(self._calls)


def left(keep: float, count: int, schedule: str) -> list[float]:
    """The shares that `count` blocks keep by `schedule` so that `keep` of the tokens is left.

    >>> [round(share, 3) for share in left(0.25, 2, "constant")], left(1.0, 2, "decreasing")
    ([0.5, 0.5], [1.0, 1.0])
    """
    low, high = min(LEAST, keep), 1.0
    for _ in range(60):
        middle = (low + high) / 2
        product = math.prod(max(share, 0.0) for share in shares(middle, count, schedule))
        low, high = (low, middle) if product > keep else (middle, high)
    return [min(share, 1.0) for share in shares(high, count, schedule)]
