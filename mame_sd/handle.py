"""Define the base of handles: what `apply_mame` returns to change, report and remove merging.

A subclass knows one kind of model. It implements the abstract members, keeps its settings in
`_settings`, and starts with them in its constructor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, Self, TypeVar

from mame_sd.config import ConfigOrFile, MaMeConfig, read_config
from mame_sd.report import Report

Settings = TypeVar("Settings")


class Handle(ABC, Generic[Settings]):
    """Control merging on one model: its settings, counters and removal."""

    _settings: Settings
    _active = True
    _lock: AbstractContextManager[Any] = nullcontext()  # held while settings change

    @property
    @abstractmethod
    def config(self) -> MaMeConfig:
        """Return the current settings."""

    @property
    @abstractmethod
    def installed(self) -> bool:
        """Return True if this handle's merging is on the model: neither removed nor replaced."""

    @abstractmethod
    def install(self) -> None:
        """Put merging back after `remove`, or replace merging that was applied later."""

    @abstractmethod
    def remove(self) -> None:
        """Remove this handle's merging from the model; merging applied later stays."""

    def __enter__(self) -> Self:
        """Return this handle, whose merging is removed at the end of the `with` block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.remove()
        except RuntimeError:  # a thread is in a forward of the model
            if kind is None:
                raise

    @abstractmethod
    def report(self) -> Report:
        """Return what merged since the last `reset`; `str` of it is for people."""

    @abstractmethod
    def reset(self) -> None:
        """Set all counters to zero."""

    @abstractmethod
    def _resolve(self, config: MaMeConfig | None, fields: dict[str, Any]) -> Settings:
        """Return the settings with these changes, or raise ValueError; change nothing."""

    def _use(self, settings: Settings) -> None:
        """Let the model merge with these settings."""
        self._settings = settings

    def _switch(self, active: bool) -> None:
        """Switch merging on or off."""
        self._active = active

    def _check_change(self, what: str) -> None:
        """Raise RuntimeError if a change of `what` is impossible now or would have no effect."""
        if not self.installed:
            raise RuntimeError(
                "expected merging to be applied, but it was removed or replaced: call apply_mame"
                " again"
            )

    def _is_active(self) -> bool:
        """Return True if the model merges."""
        return self._active

    @property
    def active(self) -> bool:
        """Return True if the model merges. If False, every call is bit-equal to the unmerged model.

        Setting it raises TypeError for a value that is not a bool, and RuntimeError as `set` does.
        """
        return self._is_active()

    @active.setter
    def active(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"active: expected True or False, got {value!r}; give one of these")
        with self._lock:
            self._check_change("active")
            self._switch(value)

    def set(self, config: ConfigOrFile = None, **fields: Any) -> None:
        """Change settings from the next forward on, for example `handle.set(keep=0.5)`.

        Args:
            config: replaces all settings, or a .json file that does. If None, they stay.
            fields: fields of MaMeConfig, over those of `config`.

        Raises:
            RuntimeError: merging was removed or replaced, so that a change would have no effect,
                or another thread is in a forward of the model.
            TypeError: `config` is neither a MaMeConfig nor a path.
            ValueError: a field is unknown, out of range or meaningless for this model. Nothing
                has changed then.
        """
        base = read_config(config)
        with self._lock:
            self._check_change("set")
            self._use(self._resolve(base, fields))

    @contextmanager
    def using(self, config: ConfigOrFile = None, **fields: Any) -> Iterator[None]:
        """Change the settings of all threads for a `with` block. Arguments and errors: see `set`.

        with handle.using(keep=0.5):
            features = model(pixel_values)
        """
        before = self._settings
        self.set(config, **fields)
        try:
            yield
        finally:
            self._use(before)
