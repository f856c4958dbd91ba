"""Control merging on one model: its settings, counters and removal."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mame_sd.config import ConfigOrFile, MaMeConfig, read_config
from mame_sd.diffusion.calibration import (
    Calibration,
    Measurement,
    calibrated,
    check_speed,
    measure,
)
from mame_sd.diffusion.context import HandleState, ResolvedConfig
from mame_sd.diffusion.denoisers import denoisers_of
from mame_sd.diffusion.families.family import class_names
from mame_sd.diffusion.hook_registry import PreHook, hook_on, put_hook, remove_hook
from mame_sd.diffusion.hooks import SizeHook, StepHook
from mame_sd.diffusion.layer import LayerHook, MergeHook
from mame_sd.diffusion.replaced_denoiser import check_of, forget_pipeline, watch_pipeline
from mame_sd.diffusion.report import MaMeReport, make_report
from mame_sd.diffusion.restoring import BlockHook, RestoreHook, TextHook
from mame_sd.diffusion.saved_setting import resolved
from mame_sd.diffusion.threads import CHANGES, check_idle
from mame_sd.handle import Handle
from mame_sd.layer_rules import means
from mame_sd.refused import known_as
from mame_sd.report import NothingMergedError, device_of

Placed = tuple[nn.Module, LayerHook | PreHook]  # a module and its hook
GONE = "no longer part of the model: call apply_mame again"


class MaMeHandle(Handle[ResolvedConfig]):
    """Control merging on one denoiser. `apply_mame` returns a handle.

    The model lives as long as the handle. The pipeline is held weakly.

    Attributes:
        root: the model, or an nn.ModuleDict of a pipeline's denoisers.
        layers: the self-attentions that may merge, each with its hook.
        restored: the MLPs and blocks that may be restored, each with its hook.
    """

    _lock = CHANGES

    def __init__(
        self,
        root: nn.Module,
        shared: HandleState,
        hooks: list[Placed],
        pipe: Any = None,
        unknown: Mapping[str, int] | None = None,
    ) -> None:
        self.root, self._pipe = root, _weakly(pipe)
        self._unknown = dict(unknown or {})  # number of attentions without a family, by class
        self._shared, self._hooks = shared, hooks
        self.layers = [(module, hook) for module, hook in hooks if isinstance(hook, MergeHook)]
        self.restored = [
            (module, hook)
            for module, hook in hooks
            if isinstance(hook, RestoreHook) and hook.keep_of
        ]
        self._names = [hook.stats.name for _, hook in self.layers]
        self._restored_names = [hook.stats.name for _, hook in self.restored]
        merging = {module for module, _ in hooks}
        self._merging = {  # modules with hooks, by denoiser of the pipeline
            name: merging & set(model.modules()) for name, model in denoisers_of(pipe).items()
        }
        shared.setting = self._setting(shared.setting.asked, shared.setting.active)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the pipeline out: a copied handle belongs to an unknown, copied pipeline."""
        return {**vars(self), "_pipe": None}

    def __repr__(self) -> str:
        where = "" if self.installed else ", removed or replaced"
        active = "" if self.active else ", not active"
        settings = ", ".join(f"{name}={value!r}" for name, value in self.config.given.items())
        return f"MaMeHandle({settings or 'defaults'}: {self.described}{active}{where})"

    @property
    def pipe(self) -> Any:
        """Return the pipeline that merging was applied to.

        It is None if merging was applied to a model, or the pipeline was freed.
        """
        return None if self._pipe is None else self._pipe()

    @property
    def config(self) -> MaMeConfig:
        """Return the settings now in force in this task."""
        return self._shared.now.config

    @property
    def applied(self) -> bool:
        """Return True if any of this handle's hooks is on the model."""
        return any(hook_on(module, hook.name) is hook for module, hook in self._hooks)

    @property
    def installed(self) -> bool:
        """Return True if all of this handle's hooks are on the model.

        They aren't if they were removed, or replaced by a later `apply_mame`.
        """
        return all(
            hook_on(module, hook.name) is hook
            for module, hook in self._hooks
            if not isinstance(hook, RestoreHook)
        )

    def _is_active(self) -> bool:
        return self._shared.now.active

    def _switch(self, active: bool) -> None:
        setting = self._shared.setting
        if active != setting.active:
            check_idle(self.root, "active")
        self._shared.setting = replace(setting, active=active)

    def _resolve(self, config: MaMeConfig | None, fields: dict[str, Any]) -> ResolvedConfig:
        setting = self._shared.setting
        asked = (config or setting.asked).replace(**fields)
        return self._setting(asked, setting.active)

    def _use(self, settings: ResolvedConfig) -> None:
        if settings.active:
            check_idle(self.root, "set")
        self._put(self._needed(settings))
        self._shared.setting = settings

    @property
    def described(self) -> str:
        """Return a description of the model.

        It distinguishes models with different layers, so that settings by layer apply to one model
        only (`calibrated_for`).
        """
        return f"{self._kind} with {len(self._names)} self-attentions"

    @property
    def _kind(self) -> str:
        """Return the class name of the model, or the names of several denoisers.

        Wrappers of torch.compile and FSDP2 are left out.
        """
        models = self.root.values() if isinstance(self.root, nn.ModuleDict) else [self.root]
        names = (class_names(getattr(model, "_orig_mod", model)) for model in models)
        # FSDP2 prefixes names of classes with "FSDP".
        kinds = (next(kind for kind in bases if not kind.startswith("FSDP")) for bases in names)
        return " and ".join(dict.fromkeys(kinds))

    @contextmanager
    def using(self, config: ConfigOrFile = None, **fields: Any) -> Iterator[None]:
        """Change the settings for this task alone, for a `with` block.

        Several threads and coroutines may generate at once, each with its own settings. Merging is
        on within the block, even if `active` is False.

            with handle.using(keep=0.25):
                image = pipe("a red key").images[0]

        `asyncio.to_thread` and FastAPI's `run_in_threadpool` inherit the settings. A generator that
        yields within the block has no task of its own, so that its settings apply to its caller
        too: run it by `contextvars.copy_context().run`. A compiled model uses the settings that
        were last set in its thread. A backward pass that recomputes blocks (checkpointing) may run
        in another thread: use `set` there.

        Args:
            config: replaces all settings, or a .json file that does. If None, they stay.
            fields: fields of MaMeConfig, over those of `config`.

        Raises:
            RuntimeError: merging was removed or replaced.
            ValueError: as for `set`.
        """
        base = read_config(config)
        self._check_change("using")
        asked = (base or self._shared.now.asked).replace(**fields)
        new = self._setting(asked, True)
        with CHANGES:
            self._put(self._needed(new))
        with self._shared.using(new):
            yield

    def paused(self) -> AbstractContextManager[None]:
        """Compute everything unmerged in this task alone, for a `with` block."""
        now = self._shared.now
        return self._shared.using(replace(now, active=False))

    @contextmanager
    def estimating_errors(self) -> Iterator[None]:
        """Estimate the errors of restored layers in this task, for a `with` block.

        `report()` then has an `error` for each of them: how far restored outputs of an MLP, or
        changes that a block makes, are from computed ones, relative to how far these are from their
        mean. It is estimated by restoring each chosen token from all others, so that the unmerged
        layers need not run. Calls take a few percent longer.

            with handle.estimating_errors():
                pipe("a red key")
            print(handle.report())

        Raises:
            RuntimeError: merging was removed or replaced; or no layer was restored in the block, or
                only in compiled regions, which estimate nothing.
        """
        self._check_change("estimating_errors")
        estimated: set[str] = set()
        here = self._shared.estimating
        outer, here.value = here.value, estimated
        try:
            yield
        finally:
            here.value = outer
        if outer is not None:
            outer |= estimated
        if not estimated:
            raise RuntimeError(
                "estimating_errors: expected a call that restores MLPs or blocks, got none;"
                " handle.report() says why, and compiled models estimate nothing"
            )

    def calibrate(
        self, prompts: Sequence[str], *, speed: float, seed: int = 0, **call: Any
    ) -> Calibration:
        """Choose how many keys and tokens each block computes, and put these settings in force.

        The pipeline makes an image of each prompt without merging. At three of its steps each block
        computes every form, shares of its keys, of its MLP's tokens and of its own, next to its own
        output, and is timed (`mame_sd.diffusion.calibration`, docs/calibration.md). Blocks whose
        forms change the denoiser's output least get the smallest shares. If the settings have
        `mlp_keep=1` or `block_keep=1`, MLPs or blocks compute all tokens. All counters are reset.

        Args:
            prompts: a few prompts, similar to those that will be used.
            speed: the wanted ratio of a denoiser call's time without merging to its time with
                merging, on this device.
            seed: seed of the first image. Each further image takes the next.
            call: further arguments of the pipeline's call.

        Returns:
            The calibration, which gives settings for other speeds too.

        Raises:
            RuntimeError: merging was removed or replaced, or another thread makes an image with the
                model.
            ValueError: there is no pipeline or no prompt, there are several denoisers, the settings
                have a tau, nothing can merge, or merging can't reach `speed`. The settings stay as
                they were.
        """
        self._check_change("calibrate")
        check_speed(speed)
        pipe = self.pipe
        if pipe is None or not prompts:
            alone = f"a {type(self.root).__name__} by itself"
            gone = alone if self._pipe is None else "a pipeline that nothing else holds"
            raise ValueError(
                "calibrate: expected a pipeline and a few prompts, got"
                f" {gone if pipe is None else 'no prompts'}; see apply_mame(pipe)"
            )

        measurement = Measurement()
        for number, prompt in enumerate(prompts):
            generator = torch.Generator().manual_seed(seed + number)
            arguments = {"generator": generator, "output_type": "latent", **call}
            measure(self, partial(pipe, prompt, **arguments), measurement)
        plain = {n: value for n, value in call.items() if isinstance(value, (int, float, str))}
        calibration = calibrated(
            self, measurement, {"prompts": len(prompts), "seed": seed, **plain}
        )
        self.set(calibration.config(speed))
        return calibration

    def report(self) -> MaMeReport:
        """Report tokens in and kept by layer since the last `reset`.

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
        texts = [hook.stats for _, hook in self._hooks if isinstance(hook, TextHook)]
        restored = [*(hook.stats for _, hook in self.restored), *texts]
        stats = [hook.stats for _, hook in self.layers]
        counted = [*stats, *(one for one in restored if one.totals()[0])]
        return make_report(counted, self._unknown)

    def others(self, pipe: Any) -> Iterator[tuple[nn.Module, str]]:
        """Yield denoisers of a pipeline that were set after `apply_mame`, each with a message.

        A wrapper around a known denoiser (torch.compile's) is not yielded.
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
        """Return an error message if the pipeline has other denoisers than at `apply_mame`.

        It is empty if the pipeline has the same denoisers, or merging was removed.
        """
        return next((message for _, message in self.others(self.pipe)), "") if self.applied else ""

    def reset(self) -> None:
        """Set all counters to zero, and drop this task's plans for a second call of one input."""
        for module, hook in self._hooks:
            if isinstance(hook, LayerHook):
                hook.stats.reset(device_of(module))
            elif isinstance(hook, StepHook):
                hook.forget()

    def remove(self) -> None:
        """Remove this handle's hooks from the model. Hooks of a later `apply_mame` stay.

        Raises:
            RuntimeError: another thread makes an image with the model.
        """
        with CHANGES:
            if self.applied:
                check_idle(self.root, "remove")
            self._take_off()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove this handle's hooks at the end of a `with` block.

        Raises:
            RuntimeError: afterwards, if the block raised nothing and another thread makes an image,
                part of which is merged then.
        """
        with CHANGES:
            self._take_off()
        if kind is None:
            check_idle(self.root, "the end of the block")

    def _take_off(self) -> None:
        """Remove this handle's hooks from the model and its check from the pipeline."""
        for module, hook in self._hooks:
            if hook_on(module, hook.name) is hook:
                remove_hook(module, hook.name)
        check = check_of(self.pipe)
        if check is not None and check.handle is self:
            forget_pipeline(self.pipe)

    def install(self) -> None:
        """Put the hooks back after `remove`, or replace those of a later `apply_mame`.

        Raises:
            RuntimeError: another thread makes an image with the model.
        """
        with CHANGES:
            needed = self._needed(self._shared.setting)
            changes = [(m, hook) for m, hook in needed if hook_on(m, hook.name) is not hook]
            if changes:
                check_idle(self.root, "install")
            self._put(changes)
            watch_pipeline(self.pipe, self)

    def _needed(self, setting: ResolvedConfig) -> list[Placed]:
        """Return the hooks that a setting needs: those on parts of blocks only if it restores."""
        configs = [one for one in (setting.config, *setting.of_layer.values()) if one is not None]
        blocks = any(one.block_share < 1 for one in configs)
        mlps = blocks or any(one.mlp_share < 1 for one in configs)
        text = any(one.equal_text and one.tau is None for one in configs)

        def needed(hook: Any) -> bool:
            if isinstance(hook, TextHook):
                return text
            return blocks or not isinstance(hook, RestoreHook) or (mlps and hook.for_mlps)

        return [(module, hook) for module, hook in self._hooks if needed(hook)]

    def _put(self, hooks: list[Placed]) -> None:
        """Put hooks on their modules, unless they are there."""
        for module, hook in hooks:
            put_hook(module, hook)
            if isinstance(hook, BlockHook):
                self._shared.restores_blocks = True

    def _setting(self, asked: MaMeConfig, active: bool) -> ResolvedConfig:
        """Resolve settings for the model.

        Raises:
            ValueError: as for `_check`, or a kernel was given together with a tau.
        """
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

    def _check_change(self, what: str) -> None:
        """Check that settings have an effect."""
        super()._check_change(what)
        if replaced := self._replaced():
            raise RuntimeError(replaced)

    def _check(self, config: MaMeConfig) -> None:
        """Check settings against the model.

        Raises:
            ValueError: the model has no layers or parts of blocks that `config` asks for, or
                `config` was made for another model.
        """
        if config.calibrated_for not in (None, self.described):
            raise ValueError(
                f"calibrated_for: expected settings that were found for {self.described}, got ones"
                f" for {config.calibrated_for}; calibrate this model, or take another file"
            )
        if config.size is not None and any(isinstance(h, SizeHook) for _, h in self._hooks):
            raise ValueError(
                f"size: expected none, for {self._kind} tells its height and width, got"
                f" {config.size}; leave it out"
            )
        rules = config.layers
        if rules is not None and (unknown := rules.unknown(self._names + self._restored_names)):
            raise ValueError(
                f"layers: expected patterns of layers of {self._kind} such as {self._names[0]!r},"
                f" got {unknown[0]!r}, which is none of them; handle.report() names them all"
            )
        self._check_restoring(config)
        if config.references is not None:
            families = (getattr(hook.layer, "family", None) for _, hook in self.layers)
            if not any(family and family.references for family in families):
                raise ValueError(
                    "references: expected a model whose reference images are tokens next to the"
                    " image (Flux Kontext, Flux 2, Qwen-Image-Edit, LongCat-Image-Edit, JoyImage,"
                    f" ...), got {known_as(self._kind)}; leave references out"
                )

    def _check_restoring(self, config: MaMeConfig) -> None:
        """Raise ValueError if `config` asks for MLPs or blocks and none can be restored."""
        rules: Mapping[str, Any] = config.layers or {}
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


# For each setting: the kind of layer it restores, its name in messages, why a model has none.
_RESTORED = {
    "mlp_keep": ("mlp", "MLP", "no MLP of its own is next to a self-attention over the image"),
    "block_keep": ("block", "block", "no block is around a self-attention over the image"),
}


def _weakly(pipe: Any) -> Callable[[], Any] | None:
    """Refer to a pipeline weakly, or strongly if its type allows no weak reference."""
    try:
        return None if pipe is None else weakref.ref(pipe)
    except TypeError:
        return lambda: pipe
