"""CaptionHandle: what `apply_captioner` gives, to read, change, switch and remove merging."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from mame_sd.captions.calls import Calls, CaptionReport
from mame_sd.captions.known_captioners import images_of
from mame_sd.captions.on_model import on_model, put, take
from mame_sd.captions.prompts import Image
from mame_sd.config import MaMeConfig
from mame_sd.perception.apply_encoder import has_encoder_hooks


class CaptionHandle(Calls):
    """Merging as applied to one LLaVA or Qwen-VL. Made by `apply_captioner`.

    Attributes:
        model: the model.
    """

    _config: MaMeConfig

    def __init__(self, model: nn.Module, config: MaMeConfig | None, fields: dict[str, Any]) -> None:
        super().__init__(model, self._images)
        self.set(MaMeConfig() if config is None else config, **fields)

    def _images(self, call: dict[str, Any]) -> list[Image]:
        assert self.config.keep is not None
        return images_of(self.model, call, self.config.keep)

    @property
    def config(self) -> MaMeConfig:
        """The settings now in force, of which `keep` counts; `set` changes them."""
        return self._config

    @property
    def installed(self) -> bool:
        """Whether merging is on the model as this handle put it."""
        on = on_model(self.model)
        return on is not None and any(one.calls is self for one in on.slots)

    def set(self, config: MaMeConfig | None = None, **fields: Any) -> None:
        """Changes `keep` from the next call on.

        Raises:
            TypeError: `config` is no MaMeConfig.
            ValueError: another setting, or one out of its range; nothing has changed then.
        """
        if config is not None and not isinstance(config, MaMeConfig):
            raise TypeError(
                f"config: expected a MaMeConfig, got {config!r}; write MaMeConfig(keep=0.25) or"
                " keep=0.25"
            )
        new = (self.config if config is None else config).replace(**fields)
        other = next((name for name in new.given if name != "keep"), None)
        if other is not None:
            raise ValueError(
                f"{other}: expected keep alone for the visual tokens of a language model,"
                f" got {new.given[other]!r}; leave it out"
            )
        self._config = new

    def report(self) -> CaptionReport:
        """Return the visual tokens since the last `reset`."""
        return replace(self.counts)

    def reset(self) -> None:
        """Sets all counters to zero."""
        self.counts = CaptionReport()

    def remove(self) -> None:
        """Takes this handle's merging off the model; that of a later one stays."""
        take(self.model, self)

    def install(self) -> None:
        """Puts merging back after `remove`, or replaces that of a later handle.

        Raises:
            ValueError: another tool has replaced `forward` or `generate`, or the tower merges
                tokens by itself.
        """
        if has_encoder_hooks(self.model):
            raise ValueError(
                "expected a vision tower that merges nothing by itself, found merging on it;"
                " call remove_mame on it first"
            )
        put(self)
