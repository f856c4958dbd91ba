"""Control the merging of a captioner's visual tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from mame_sd.captions.captioner_registry import images_of
from mame_sd.captions.patch import attach, detach, patch_on
from mame_sd.captions.prompts import Image
from mame_sd.captions.shorten import CaptionReport, PromptShortener
from mame_sd.config import ConfigOrFile, MaMeConfig, read_config
from mame_sd.diffusion.threads import Nested
from mame_sd.handle import Handle
from mame_sd.perception.apply_encoder import has_encoder_hooks


class CaptionHandle(Handle[MaMeConfig]):
    """Merging as applied to one LLaVA or Qwen-VL, made by `apply_captioner`.

    Attributes:
        model: the model.
        shortener: what shortens the prompts of its calls.
    """

    def __init__(self, model: nn.Module, config: MaMeConfig | None, fields: dict[str, Any]) -> None:
        self.model = model
        self._own = Nested()  # MaMeConfigs of `using`
        self.shortener = PromptShortener(model, self._images)
        self._use(self._resolve(read_config(config) or MaMeConfig(), fields))

    def _images(self, call: dict[str, Any]) -> list[Image]:
        assert self.config.keep is not None
        return images_of(self.model, call, self.config.keep)

    @property
    def config(self) -> MaMeConfig:
        """Return the settings now in force in this task, of which only `keep` is used."""
        config: MaMeConfig = self._own.innermost(self._settings)
        return config

    @contextmanager
    def using(self, config: ConfigOrFile = None, **fields: Any) -> Iterator[None]:
        """Change settings in this thread or task alone. Arguments and errors are those of `set`.

        Each answer keeps the settings with which it began. Nothing merges while `active` is False.
        """
        base = read_config(config)
        self._check_change("using")
        with self._own.using(self._resolve(base, fields)):
            yield

    @property
    def installed(self) -> bool:
        """Return True if this handle's merging is on the model."""
        patch = patch_on(self.model)
        return patch is not None and patch.shortener is self.shortener

    def _resolve(self, config: MaMeConfig | None, fields: dict[str, Any]) -> MaMeConfig:
        new = (config or self.config).replace(**fields)
        other = next((name for name in new.given if name != "keep"), None)
        if other is not None:
            raise ValueError(
                f"{other}: expected only keep for the visual tokens of a language model,"
                f" got {new.given[other]!r}; leave it out"
            )
        return new

    def _switch(self, active: bool) -> None:
        super()._switch(active)
        self.shortener.active = active

    def report(self) -> CaptionReport:
        """Return the visual tokens since the last `reset`."""
        return self.shortener.report()

    def reset(self) -> None:
        """Set all counters to zero."""
        self.shortener.sums.reset()

    def remove(self) -> None:
        """Remove this handle's merging from the model; that of a later handle stays."""
        detach(self.model, self.shortener)

    def install(self) -> None:
        """Put merging back after `remove`, or replace that of a later handle.

        Raise ValueError if another tool has replaced `forward` or `generate`, or the vision tower
        merges by itself.
        """
        if has_encoder_hooks(self.model):
            raise ValueError(
                "expected a vision tower that merges nothing by itself, found merging on it;"
                " call remove_mame on it first"
            )
        attach(self.shortener)
