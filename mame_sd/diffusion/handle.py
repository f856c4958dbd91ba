"""What `apply_mame` gives: merging on one model, with its settings, counters and removal."""

from __future__ import annotations

from typing import Any

from torch import nn

from mame_sd.config import PARTS, MaMeConfig
from mame_sd.core.plan import Plan
from mame_sd.diffusion.hook_registry import AroundHook, PreHook, hook_on, put_hook, take_hook
from mame_sd.diffusion.hooks import MergeHook, Shared
from mame_sd.diffusion.processor import make_config
from mame_sd.report import MaMeReport, device_of, make_report

Placed = tuple[nn.Module, AroundHook | PreHook]  # a hook and the module it goes on


class MaMeHandle:
    """Merging as applied to one model: settings, counters, removal. Made by `apply_mame`."""

    def __init__(self, root: nn.Module, shared: Shared, hooks: list[Placed]) -> None:
        self.root = root
        self._shared = shared
        self._hooks = hooks
        self._layers = [(module, hook) for module, hook in hooks if isinstance(hook, MergeHook)]
        self._check(shared.config)

    @property
    def config(self) -> MaMeConfig:
        """The settings now in force."""
        return self._shared.config

    @property
    def installed(self) -> bool:
        """Whether this handle's hooks are (all) on the model: not removed, not replaced by a later `apply_mame`."""
        return all(hook_on(module, hook.name) is hook for module, hook in self._hooks if _is_on(hook))

    @property
    def active(self) -> bool:
        """Whether the hooks merge; False makes every call bit-equal to an unhooked model."""
        return self._shared.active

    @active.setter
    def active(self, value: bool) -> None:
        self._shared.active = value

    def set(self, config: MaMeConfig | None = None, **fields: Any) -> None:
        """Changes live settings from the next forward on: `handle.set(tau=0.9)`; `config` replaces all of them.

        Raises:
            RuntimeError: merging was removed or replaced, so the change would have no effect.
            ValueError: a field is unknown or out of its range, or the model lacks what it merges; nothing has changed
                then.
        """
        if not self.installed:
            raise RuntimeError("expected merging to be applied, but it was removed or replaced: call apply_mame again")
        new = make_config(self.config if config is None else config, fields)
        self._check(new)
        self._shared.config = new
        self.install()

    def report(self) -> MaMeReport:
        """Tokens in and kept per layer since the last `reset`.

        Raises:
            NothingMergedError: a forward has run and no layer could merge.
        """
        return make_report(hook.stats for _, hook in self._layers if hook.on)

    def reset(self) -> None:
        """Sets all counters to zero and drops captured plans."""
        for module, hook in self._layers:
            hook.stats.reset(device_of(module))

    def capture(self, on: bool = True) -> None:
        """Keeps the latest plan of every layer for `plans` (memory: one plan a layer; not under torch.compile)."""
        for _, hook in self._layers:
            hook.stats.capture = on
            hook.stats.plan = hook.stats.plan if on else None

    def plans(self) -> dict[str, Plan]:
        """The latest plan of every layer that merged since `capture`, by layer name; sizes stand in `report`."""
        found = (hook.stats for _, hook in self._layers if hook.on)
        return {stats.name: stats.plan for stats in found if stats.plan is not None}

    def remove(self) -> None:
        """Takes this handle's hooks off the model; hooks of a later `apply_mame` stay."""
        for module, hook in self._hooks:
            if hook_on(module, hook.name) is hook:
                take_hook(module, hook.name)

    def install(self) -> None:
        """Puts the hooks back (after `remove`, or in place of a later `apply_mame`); those of parts that are off stay off."""
        for module, hook in self._hooks:
            if _is_on(hook):
                put_hook(module, hook)
            else:
                take_hook(module, hook.name)

    def _check(self, config: MaMeConfig) -> None:
        """Raises ValueError where `config` asks for a part of blocks that the model lacks."""
        there = {hook.stats.part for _, hook in self._layers}
        for name in PARTS:
            if getattr(config, name) is not None and name not in there:
                raise ValueError(
                    f"{name}: expected blocks of a UNet, DiT or PixArt (BasicTransformerBlock) that have such a part, "
                    f"found none in {type(self.root).__name__}; leave {name} out"
                )


def _is_on(hook: Any) -> bool:
    """Whether the settings in force need this hook."""
    return not isinstance(hook, MergeHook) or hook.on
