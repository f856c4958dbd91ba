"""CaptionHandle: what `apply_captioner` gives, to read, change, switch and remove merging."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from mame_sd.captions.calls import Calls, VisualCounts, calls_on
from mame_sd.captions.prompts import Image
from mame_sd.captions.towers import images_of, layer_of
from mame_sd.config import MaMeConfig
from mame_sd.perception.handle import EncoderHandle
from mame_sd.perception.report import EncoderReport
from mame_sd.perception.settings import (
    EVERY,
    LEAST,
    chosen_blocks,
    is_plain,
    schedule_of,
    shares,
)


@dataclass(frozen=True)
class CaptionReport:
    """What merging did: means over the images since the last reset.

    Attributes:
        images: how many.
        visual_before: image tokens that the language model would have read.
        visual_after: those that it read.
        tower: the blocks of the vision tower.
    """

    images: int
    visual_before: float
    visual_after: float
    tower: EncoderReport

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {**asdict(self), "tower": self.tower.to_dict()}

    def __str__(self) -> str:
        share = self.visual_after / self.visual_before if self.visual_before else 1.0
        return (
            f"{self.tower}\n{self.visual_before:.0f} -> {self.visual_after:.1f} visual tokens an"
            f" image for the language model ({share:.0%}), {self.images} images"
        )


class MergedImages:
    """What the images of a call give where the tower of `model` merges."""

    def __init__(self, model: nn.Module, tower: EncoderHandle) -> None:
        self.model, self.tower = model, tower

    def __call__(self, call: dict[str, Any]) -> list[Image]:
        one = any(config.keep is None for config in self.tower.configs.values())
        return images_of(self.model, self.tower, call, one)


class CaptionHandle:
    """Merging as applied to one LLaVA. Made by `apply_captioner`.

    Attributes:
        model: the LLaVA.
        tower: merging on its vision tower.
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
        depth = layer_of(model)
        every = 1 if is_plain(config, fields) else EVERY
        self._blocks = chosen_blocks(blocks, depth, every)
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
        self._calls = Calls(model, MergedImages(model, self.tower))

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

    @property
    def config(self) -> MaMeConfig:
        """The settings now in force, of the first block that merges."""
        return self.tower.config

    @property
    def installed(self) -> bool:
        """Whether merging is on the model as this handle put it."""
        return self._calls in calls_on(self.model) and self.tower.installed

    @property
    def active(self) -> bool:
        """Whether tokens merge; False makes every call bit-equal to a model without merging."""
        return self._calls.active

    @active.setter
    def active(self, value: bool) -> None:
        self._calls.active = self.tower.active = value

    def set(self, config: MaMeConfig | None = None, **fields: Any) -> None:
        """Changes live settings from the next call on, as `EncoderHandle.set`; one `keep` is the
        share of the visual tokens that the language model gets.
        """
        config, fields = self._by_block(config, fields)
        self.tower.set(config, **fields)

    def report(self) -> CaptionReport:
        """Visual tokens and the tower's blocks since the last `reset`."""
        counts = self._calls.counts
        images = max(counts.images, 1)
        return CaptionReport(
            counts.images, counts.unmerged / images, counts.kept / images, self.tower.report()
        )

    def reset(self) -> None:
        """Sets all counters to zero."""
        self.tower.reset()
        self._calls.counts = VisualCounts()

    def remove(self) -> None:
        """Takes this handle's merging off the model; that of a later one stays."""
        if self._calls in calls_on(self.model):
            self._calls.take()
        self.tower.remove()

    def install(self) -> None:
        """Puts merging back after `remove`, or replaces that of a later handle.

        Raises:
            ValueError: another tool has replaced `forward` or `generate`.
        """
        self._calls.put()
        self.tower.install()
        self.tower.capture()


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
