"""What `apply_mame` gives: merging on one model, with its settings, counters and removal."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mame_sd.config import MaMeConfig
from mame_sd.diffusion.calibration import Calibration, check_speed, measure_images
from mame_sd.diffusion.context import ResolvedConfig, Shared
from mame_sd.diffusion.denoisers import denoisers_of
from mame_sd.diffusion.families.family import class_names
from mame_sd.diffusion.families.refused import known_as
from mame_sd.diffusion.hook_registry import PreHook, hook_on, put_hook, take_hook
from mame_sd.diffusion.hooks import SizeHook, StepHook
from mame_sd.diffusion.layer import LayerHook, MergeHook
from mame_sd.diffusion.pipeline_check import check_of, forget_pipeline, watch_pipeline
from mame_sd.diffusion.processor import make_config
from mame_sd.diffusion.restoring import BlockHook, MLPHook
from mame_sd.diffusion.saved_setting import resolved
from mame_sd.diffusion.threads import CHANGES, check_idle
from mame_sd.layer_rules import means
from mame_sd.report import MaMeReport, NothingMergedError, device_of, make_report

Placed = tuple[nn.Module, LayerHook | PreHook]  # a hook and the module it goes on
GONE = "no longer part of the model: call apply_mame again"


class MaMeHandle:
    """Merging as applied to one model: settings, counters, removal. Made by `apply_mame`.

    It holds the model, which lives as long as the handle does, and its pipeline weakly.

    Attributes:
        root: the model, or an nn.ModuleDict of a pipeline's denoisers.
        layers: the self-attentions that may merge, each with its hook.
        restored: the MLPs and blocks that may be restored, each with its hook.
    """

    def __init__(
        self,
        root: nn.Module,
        shared: Shared,
        hooks: list[Placed],
        pipe: Any = None,
        unknown: Mapping[str, int] | None = None,
    ) -> None:
        self.root, self._pipe = root, _weakly(pipe)
        self._unknown = dict(unknown or {})  # attention of no family, how many by class
        self._shared, self._hooks = shared, hooks
        self.layers = [(module, hook) for module, hook in hooks if isinstance(hook, MergeHook)]
        self.restored = [
            (module, hook) for module, hook in hooks if isinstance(hook, (MLPHook, BlockHook))
        ]
        self._names = [hook.stats.name for _, hook in self.layers]
        self._restored_names = [hook.stats.name for _, hook in self.restored]
        merging = {module for module, _ in hooks}
        self._merging = {  # in each of the pipeline's denoisers
            name: merging & set(model.modules()) for name, model in denoisers_of(pipe).items()
        }
        shared.setting = self._setting(shared.setting.asked, shared.setting.active)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the pipeline out: a copy goes with a copied pipeline, which it does not know."""
        return {**vars(self), "_pipe": None}

    def __repr__(self) -> str:
        where = "" if self.installed else ", removed or replaced"
        active = "" if self.active else ", not active"
        given = ", ".join(f"{name}={value!r}" for name, value in self.config.given.items())
        return f"MaMeHandle({given or 'defaults'}: {self.described}{active}{where})"

    @property
    def pipe(self) -> Any:
        """The pipeline that merging was applied to; None: a model by itself, or it is gone."""
        return None if self._pipe is None else self._pipe()

    @property
    def config(self) -> MaMeConfig:
        """The settings now in force (in this task)."""
        return self._shared.now.config

    @property
    def applied(self) -> bool:
        """Whether any of this handle's hooks is on the model."""
        return any(hook_on(module, hook.name) is hook for module, hook in self._hooks)

    @property
    def installed(self) -> bool:
        """Whether this handle's hooks are (all) on the model: not removed, not replaced by a later
        `apply_mame`.
        """
        return all(hook_on(module, hook.name) is hook for module, hook in self._hooks)

    @property
    def active(self) -> bool:
        """Whether the hooks merge; False makes every call bit-equal to an unhooked model.

        Setting it raises RuntimeError where merging was removed or replaced, or another thread
        makes an image with the model, and TypeError for what is no bool.
        """
        return self._shared.now.active

    @active.setter
    def active(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"active: expected True or False, got {value!r}")
        with CHANGES:
            self._check_installed()
            setting = self._shared.setting
            if value != setting.active:
                check_idle(self.root, "active")
            self._shared.setting = replace(setting, active=value)

    @property
    def described(self) -> str:
        """The model in words that tell it from those that settings by layer do not go for, as
        `made_for` has them.
        """
        return f"{self._kind} with {len(self._names)} self-attentions"

    @property
    def _kind(self) -> str:
        """The class of the model, without torch.compile's and FSDP2's wrappers; those of several
        denoisers.
        """
        models = self.root.values() if isinstance(self.root, nn.ModuleDict) else [self.root]
        names = (class_names(getattr(model, "_orig_mod", model)) for model in models)
        # FSDP2 puts "FSDP" before the name of a class
        kinds = (next(kind for kind in own if not kind.startswith("FSDP")) for own in names)
        return " and ".join(dict.fromkeys(kinds))

    def set(self, config: MaMeConfig | None = None, **fields: Any) -> None:
        """Changes live settings from the next forward on: `handle.set(tau=0.9)`; `config` replaces
        all of them.

        Raises:
            RuntimeError: merging was removed or replaced, so the change would have no effect; or
                another thread makes an image with the model.
            ValueError: a field is unknown or out of its range, or the model lacks what it merges;
                nothing has changed then.
        """
        with CHANGES:
            self._check_installed()
            setting = self._shared.setting
            asked = make_config(setting.asked if config is None else config, fields)
            new = self._setting(asked, setting.active)
            if setting.active:
                check_idle(self.root, "set")
            self._shared.setting = new

    @contextmanager
    def using(self, config: MaMeConfig | None = None, **fields: Any) -> Iterator[None]:
        """Settings of this task alone for a `with` block, whatever others set: several threads and
        coroutines may generate at once, each with its own. Merging is on in the block, also where
        `active` is False.

            with handle.using(keep=0.25):
                image = pipe("a red key").images[0]

        `asyncio.to_thread` and FastAPI's `run_in_threadpool` take the settings along. A generator
        that yields inside of the block has no task of its own, so that its settings hold for its
        caller meanwhile: run it by `contextvars.copy_context().run`. A compiled model takes the
        settings that were last set in its thread. A backward pass that computes blocks again
        (checkpointing) may run in another thread: there `set` is the way.

        Raises:
            RuntimeError: merging was removed or replaced.
            ValueError: as `set`.
        """
        self._check_installed()
        asked = make_config(self._shared.now.asked if config is None else config, fields)
        new = self._setting(asked, True)
        own = self._shared.own
        own.value = (*(own.value or ()), new)
        try:
            yield
        finally:  # blocks may end in another order than they began
            own.value = tuple(one for one in own.value or () if one is not new)

    def calibrate(
        self, prompts: Sequence[str], *, speed: float, seed: int = 0, **call: Any
    ) -> Calibration:
        """Finds which layers should merge and how much, and puts that in force: where merging
        changes a layer's output least, it merges most.

        The pipeline makes an image of each prompt without merging. At three of its steps each layer
        computes what every form of merging would give beside its own output, and is timed
        (`mame_sd.diffusion.calibration`, docs/calibration.md).

        Args:
            prompts: a few, like those that will be asked for.
            speed: how many times as fast as without merging a call of the denoiser is to be, on
                this device.
            seed: of the first image; each further one takes the next.
            call: further arguments of the pipeline's call.

        Raises:
            RuntimeError: merging was removed or replaced, or another thread makes an image with the
                model.
            ValueError: no pipeline or no prompts, several denoisers, settings with tau, nothing
                that could merge, or more speed than merging gives; the settings are as before then.
        """
        self._check_installed()
        check_speed(speed)
        pipe = self.pipe
        if pipe is None or not prompts:
            alone = f"a {type(self.root).__name__} by itself"
            gone = alone if self._pipe is None else "a pipeline that nothing else holds"
            raise ValueError(
                "calibrate: expected a pipeline and a few prompts, got"
                f" {gone if pipe is None else 'no prompts'}; see apply_mame(pipe)"
            )
        runs = [
            partial(
                pipe,
                prompt,
                generator=torch.Generator().manual_seed(seed + number),
                **{"output_type": "latent", **call},
            )
            for number, prompt in enumerate(prompts)
        ]
        plain = {n: value for n, value in call.items() if isinstance(value, (int, float, str))}
        about = {"prompts": len(prompts), "seed": seed, **plain}
        with self.using():
            calibration = measure_images(self, runs, about)
        self.set(calibration.config(speed))
        return calibration

    def report(self) -> MaMeReport:
        """Tokens in and kept per layer since the last `reset`.

        Raises:
            NothingMergedError: a forward has run and no layer could merge, or the pipeline has
                another denoiser now.
        """
        if replaced := self._replaced():
            raise NothingMergedError(replaced)
        if self.applied:
            there = set(self.root.modules())
            for module, hook in self.layers:
                if module not in there:
                    hook.stats.last_reason = GONE
        restored = (hook.stats for _, hook in self.restored)
        stats = [hook.stats for _, hook in self.layers]
        counted = [*stats, *(one for one in restored if one.totals()[0])]
        return make_report(counted, self._unknown)

    def others(self, pipe: Any) -> Iterator[tuple[nn.Module, str]]:
        """Denoisers of a pipeline that came after `apply_mame`, and what to say of each; a wrapper
        around one (torch.compile's) is none.
        """
        for name, model in denoisers_of(pipe).items() if self._merging else ():
            placed = self._merging.get(name)
            if placed is None:
                came = f"that {type(model).__name__} came after apply_mame"
            elif placed and placed.isdisjoint(model.modules()):
                came = f"it is another {type(model).__name__} than at apply_mame"
            else:
                continue
            yield model, f"expected merging on pipe.{name}, but {came}: call apply_mame again"

    def _replaced(self) -> str:
        """What is wrong where merging is on, and the pipeline has another denoiser than those of
        `apply_mame`.
        """
        return next((told for _, told in self.others(self.pipe)), "") if self.applied else ""

    def reset(self) -> None:
        """Sets all counters to zero, and drops what this thread keeps for a second call of the same
        input.
        """
        for module, hook in self._hooks:
            if isinstance(hook, LayerHook):
                hook.stats.reset(device_of(module))
            elif isinstance(hook, StepHook):
                hook.forget()

    def remove(self) -> None:
        """Takes this handle's hooks off the model; hooks of a later `apply_mame` stay.

        Raises RuntimeError where another thread makes an image with the model.
        """
        with CHANGES:
            ours = [(m, hook) for m, hook in self._hooks if hook_on(m, hook.name) is hook]
            if ours:
                check_idle(self.root, "remove")
            for module, hook in ours:
                take_hook(module, hook.name)
            check = check_of(self.pipe)
            if check is not None and check.handle is self:
                forget_pipeline(self.pipe)

    def install(self) -> None:
        """Puts the hooks back after `remove`, or replaces those of a later `apply_mame`.

        Raises RuntimeError where another thread makes an image with the model.
        """
        with CHANGES:
            changes = [(m, hook) for m, hook in self._hooks if hook_on(m, hook.name) is not hook]
            if changes:
                check_idle(self.root, "install")
            for module, hook in changes:
                put_hook(module, hook)
            watch_pipeline(self.pipe, self)

    def _setting(self, asked: MaMeConfig, active: bool) -> ResolvedConfig:
        """Raises ValueError as `_check`."""
        config = resolved(self.root, asked)
        self._check(config)
        names = () if config.layers is None else (*self._names, *self._restored_names)
        of_layer = {name: config.of_layer(name) for name in names}
        setting = ResolvedConfig(config, active, asked, of_layer)
        if self._shared.kernel is not None and "tokens" in setting.methods:
            raise ValueError(
                "kernel: expected none with tau, whose whole tokens merge before attention is"
                " called; give keep instead"
            )
        return setting

    def _check_installed(self) -> None:
        """Raise RuntimeError where settings would have no effect; else the pipeline is checked from
        now on, also where another block's hooks, which are gone, took its check away.
        """
        if not self.installed:
            raise RuntimeError(
                "expected merging to be applied, but it was removed or replaced: call apply_mame"
                " again"
            )
        if replaced := self._replaced():
            raise RuntimeError(replaced)
        watch_pipeline(self.pipe, self)

    def _check(self, config: MaMeConfig) -> None:
        """Raises ValueError where `config` asks for layers or a part of blocks that the model
        lacks, or is for another.
        """
        if config.made_for not in (None, self.described):
            raise ValueError(
                f"made_for: expected settings that were found for {self.described}, got ones for"
                f" {config.made_for}; calibrate this model, or take another file"
            )
        if config.size is not None and any(isinstance(h, SizeHook) for _, h in self._hooks):
            raise ValueError(
                f"size: expected none, for {self._kind} tells its height and width, got"
                f" {config.size}; leave it out"
            )
        unknown = (
            []
            if config.layers is None
            else config.layers.unknown([*self._names, *self._restored_names])
        )
        if unknown:
            raise ValueError(
                f"layers: expected patterns of layers of {self._kind} such as {self._names[0]!r},"
                f" got {unknown[0]!r}, which is none of them; handle.report() names them all"
            )
        self._check_restoring(config)
        if config.references is not None:
            families = (getattr(hook.layer, "family", None) for _, hook in self.layers)
            if not any(family and family.references for family in families):
                raise ValueError(
                    "references: expected a model whose reference images are tokens beside the"
                    " image (Flux Kontext, Flux 2, Qwen-Image-Edit, LongCat-Image-Edit, JoyImage,"
                    f" ...), got {known_as(self._kind)}; leave references out"
                )

    def _check_restoring(self, config: MaMeConfig) -> None:
        """Raise ValueError if `config` asks for MLPs or blocks of which none can be restored."""
        rules = config.layers or {}
        for name, (kind, noun, none) in _RESTORED.items():
            asking = [one for one, rule in rules.items() if rule and (rule.get(name) or 1) < 1]
            if not asking and (getattr(config, name) or 1) == 1:
                continue
            hooks = [hook for _, hook in self.restored if hook.stats.kind == kind]
            able = [hook.stats.name for hook in hooks if not hook.never]
            if not able:
                why = next((hook.never for hook in hooks), none)
                raise ValueError(
                    f"{name}: expected a model with {noun}s that can be restored, got"
                    f" {self._kind}: {why}; leave {name} out"
                )
            for pattern in asking:
                if not any(means(pattern, one) for one in able):
                    raise ValueError(
                        f"layers: {pattern}: {name}: expected a pattern of {noun}s such as"
                        f" {able[0]!r}; handle.report() names them all"
                    )


# By setting the kind of layer that is restored, its name in messages, and why a model has none.
_RESTORED = {
    "mlp_keep": ("mlp", "MLP", "no MLP of its own is next to a self-attention over the image"),
    "block_keep": ("block", "block", "no block is around a self-attention over the image"),
}


def _weakly(pipe: Any) -> Callable[[], Any] | None:
    """Refer to a pipeline weakly, or strongly where its type allows no weak reference."""
    try:
        return None if pipe is None else weakref.ref(pipe)
    except TypeError:
        return lambda: pipe
