"""apply_mame: merging as hooks on a model's self-attention modules, and on its MLPs and cross-attention if asked to.

    handle = apply_mame(pipe, tau=0.8)
    image = pipe("a red key").images[0]
    print(handle.report())
    remove_mame(pipe)                      # bit-equal to before

    with mame(pipe, tau=0.8):              # for one block of code; what was there before comes back
        image = pipe("a red key").images[0]

A hook on the module survives what replaces processors: slicing, `fuse_qkv_projections`, IP-Adapter, PAG. It also learns
the true (h, w) of the tokens from the Transformer2DModel around it. Each module carries one merging hook at most: applying
again replaces it. A `copy.deepcopy` of a hooked model merges with its own weights; to save a whole model with `torch.save`
call `remove_mame` first.

`torch.compile` of the model with `keep` makes one graph of it, merging included, for each size and batch size (not with
`dynamic=True`), and a small one of the hook that reads the step. With `tau` how many tokens stay depends on the data,
which breaks the graph in each merging layer (results stay right): for one graph compile with `fullgraph=True`, or set
`torch._dynamo.config.capture_dynamic_output_shape_ops = True`. Of `compile_repeated_blocks` diffusers' hooks make one graph
for every block, which passes `recompile_limit`: there take the processor, which all blocks share (`MaMeAttnProcessor`; it
does not count compiled calls).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from diffusers.models.attention_processor import Attention
from torch import nn

from mame_sd.config import MaMeConfig
from mame_sd.core.plan import Plan
from mame_sd.diffusion.attention import PLAIN_PROCESSORS, default_processor, fixed_reason
from mame_sd.diffusion.families.family import Call, Family, Tokens, family_names, family_of
from mame_sd.diffusion.families.sequence import FamilyLayer
from mame_sd.diffusion.families.transformers import EXCLUDED
from mame_sd.diffusion.hooks import (
    IMAGE_MODULES,
    MAME_HOOK,
    MAME_SIZE_HOOK,
    MAME_STEP_HOOK,
    FamilyHook,
    MergeHook,
    Shared,
    SizeHook,
    StepHook,
    hook_on,
    image_size,
    put_hook,
    take_hook,
)
from mame_sd.diffusion.parts import PartHook, check_parts, parts_of
from mame_sd.diffusion.processor import MaMeAttnProcessor, make_config
from mame_sd.report import LayerStats, MaMeReport, device_of, make_report

_OURS = (MAME_HOOK, MAME_SIZE_HOOK, MAME_STEP_HOOK)
_DENOISERS = ("unet", "transformer")
# Attention over frames lies below modules of these names (AnimateDiff, SVD, text-to-video, I2VGen-XL).
_TEMPORAL = {
    "motion_modules",
    "temporal_transformer_blocks",
    "temp_attentions",
    "transformer_in",
    "image_latents_temporal_encoder",
}


class MaMeHandle:
    """Merging as applied to one model: settings, counters, removal. Made by `apply_mame`."""

    def __init__(self, root: nn.Module, shared: Shared, hooks: list[tuple[nn.Module, str, Any]]) -> None:
        self.root = root
        self._shared = shared
        self._hooks = hooks
        self._layers = [(module, hook.stats) for module, name, hook in hooks if name == MAME_HOOK]
        check_parts(shared.config, (hook for _, _, hook in hooks), root)

    @property
    def config(self) -> MaMeConfig:
        """The settings now in force."""
        return self._shared.config

    @property
    def installed(self) -> bool:
        """Whether this handle's hooks are (all) on the model: not removed, not replaced by a later `apply_mame`."""
        return all(hook_on(module, name) is hook for module, name, hook in self._hooks if _is_on(hook))

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
        check_parts(new, (hook for _, _, hook in self._hooks), self.root)
        self._shared.config = new
        self.install()

    def report(self) -> MaMeReport:
        """Tokens in and kept per layer since the last `reset`.

        Raises:
            NothingMergedError: a forward has run and no layer could merge.
        """
        return make_report(self._in_force())

    def reset(self) -> None:
        """Sets all counters to zero and drops captured plans."""
        for module, stats in self._layers:
            stats.reset(device_of(module))

    def capture(self, on: bool = True) -> None:
        """Keeps the latest plan of every layer for `plans` (memory: one plan a layer; not under torch.compile)."""
        for _, stats in self._layers:
            stats.capture = on
            stats.plan = stats.plan if on else None

    def plans(self) -> dict[str, Plan]:
        """The latest plan of every layer that merged since `capture`, by layer name; sizes stand in `report`."""
        return {stats.name: stats.plan for stats in self._in_force() if stats.plan is not None}

    def remove(self) -> None:
        """Takes this handle's hooks off the model; hooks of a later `apply_mame` stay."""
        for module, name, hook in self._hooks:
            if hook_on(module, name) is hook:
                take_hook(module, name)

    def install(self) -> None:
        """Puts the hooks back (after `remove`, or in place of a later `apply_mame`); those of parts that are off stay off."""
        for module, name, hook in self._hooks:
            if _is_on(hook):
                put_hook(module, name, hook)
            else:
                take_hook(module, name)

    def _in_force(self) -> list[LayerStats]:
        """The counters of all layers that the settings merge."""
        return [hook.stats for _, name, hook in self._hooks if name == MAME_HOOK and _is_on(hook)]


def apply_mame(target: Any, config: MaMeConfig | None = None, **fields: Any) -> MaMeHandle:
    """Merges tokens in every large self-attention of `target` until `remove_mame`.

    Layers with at least `min_tokens` tokens merge: by default 1024, which is the two largest levels of SD 1.x and SDXL at
    their own sizes, and of SD 2.x at 768 pixels (9216, 2304). Merging that is on `target` already is replaced.

    Args:
        target: a diffusers pipeline (its UNet or transformer is taken; a ControlNet has a call of its own), a model, or
            a single Attention module.
        config: the settings; None is the measured default.
        fields: fields of MaMeConfig, over those of `config`.

    Raises:
        TypeError: `target` is neither a module nor a pipeline with a denoiser.
        ValueError: no self-attention that could merge, or a MaMeAttnProcessor is installed, or bad settings, or ones
            that the model lacks the parts for (`mlp`, `cross`).
    """
    handle = build_handle(target, make_config(config, fields))
    remove_mame(handle.root, processors=False)
    handle.install()
    return handle


def build_handle(target: Any, config: MaMeConfig) -> MaMeHandle:
    """A handle for `target` whose hooks are not installed yet; raises as `apply_mame` does."""
    root = denoiser_of(target)
    shared = Shared(config)
    hooks: list[tuple[nn.Module, str, Any]] = []
    images: dict[str, tuple[SizeHook, Family | None]] = {}
    parts: dict[str, str] = {}
    steps: list[str] = []
    for path, module in root.named_modules():
        step = None if any(_within(path, outer) for outer in steps) else StepHook.of(module, shared)
        if step is not None:
            steps.append(path)
            hooks.append((module, MAME_STEP_HOOK, step))
        reader = _reader_of(module)
        if reader is not None:
            images[path] = SizeHook(module, reader[0]), reader[1]
            hooks.append((module, MAME_SIZE_HOOK, images[path][0]))
        inside = max((outer for outer in images if _within(path, outer)), key=len, default=None)
        image, family = (None, None) if inside is None else images[inside]
        if family is None and _in_space(path):
            parts.update(parts_of(path, module))
        if path in parts:
            hooks.append((module, MAME_HOOK, PartHook(shared, LayerStats(path, device_of(module), parts[path]), image)))
            continue
        if not (
            family.owns(path, module) if family else isinstance(module, Attention) and _may_merge(path, module, image)
        ):
            continue
        if isinstance(getattr(module, "processor", None), MaMeAttnProcessor):
            raise ValueError(
                f"expected no merging on {path or type(module).__name__}, found {module.processor}, which would merge "
                "twice: call remove_mame first"
            )
        stats = LayerStats(path or type(module).__name__, device_of(module))
        if family is None or image is None:
            hooks.append((module, MAME_HOOK, MergeHook(shared, stats, image)))
        else:
            hooks.append((module, MAME_HOOK, FamilyHook(shared, stats, image, FamilyLayer(module, family))))
    if not any(isinstance(hook, (MergeHook, FamilyHook)) for _, _, hook in hooks):
        raise ValueError(_nothing_found(root))
    return MaMeHandle(root, shared, hooks)


def remove_mame(target: Any, processors: bool = True) -> None:
    """Takes all merging off `target`; results are bit-equal to before it was applied. Does nothing if there is none.

    Args:
        target: what `apply_mame` takes.
        processors: also replace each MaMeAttnProcessor by its inner, or diffusers' default, processor.
    """
    for module in denoiser_of(target).modules():
        for name in _OURS:
            take_hook(module, name)
        processor: Any = getattr(module, "processor", None)
        if processors and isinstance(processor, MaMeAttnProcessor):
            attn: Any = module
            attn.processor = processor.inner or default_processor(attn)


@contextmanager
def mame(target: Any, config: MaMeConfig | None = None, **fields: Any) -> Iterator[MaMeHandle]:
    """Merging for a `with` block. Afterwards, raised or not, what was applied before is in force again.

    Takes the arguments of `apply_mame` and gives its handle.
    """
    with hooks_restored(target):
        yield apply_mame(target, config, **fields)


@contextmanager
def hooks_restored(target: Any) -> Iterator[None]:
    """After the block `target` carries the same merging hooks as before it, whatever the block applied or removed."""
    modules = list(denoiser_of(target).modules())
    before = {(module, name): hook_on(module, name) for module in modules for name in _OURS}
    try:
        yield
    finally:
        for (module, name), hook in before.items():
            if hook is None:
                take_hook(module, name)
            else:
                put_hook(module, name, hook)


def has_hooks(target: Any) -> bool:
    """Whether any merging hook is on `target`, active or not."""
    return any(hook_on(module, name) is not None for module in denoiser_of(target).modules() for name in _OURS)


def denoiser_of(target: Any) -> nn.Module:
    """The module that merging goes on: `target` itself, or a pipeline's UNet or transformer.

    Raises:
        TypeError: neither a module nor a pipeline with a denoiser.
    """
    if isinstance(target, nn.Module):
        return target
    for name in _DENOISERS:
        model = getattr(target, name, None)
        if isinstance(model, nn.Module):
            return model
    raise TypeError(
        f"expected a torch module or a diffusers pipeline with a unet or transformer, got {type(target).__name__}"
    )


def _reader_of(module: nn.Module) -> tuple[Callable[[Any, Call], Tokens | None], Family | None] | None:
    """What reads the tokens of `module`'s calls, and the family of attention below it (None: a UNet's)."""
    if type(module).__name__ in EXCLUDED:
        raise ValueError(
            f"expected a model whose attention can be merged, got {type(module).__name__}: {EXCLUDED[type(module).__name__]}"
        )
    if type(module).__name__ in IMAGE_MODULES:
        return image_size, None
    family = family_of(module)
    return None if family is None else (family.tokens, family)


def _within(path: str, outer: str) -> bool:
    """Whether the module at `path` lies below the one at `outer` ("" is the root, which counts as within itself)."""
    return not outer or path.startswith(outer + ".")


def _may_merge(path: str, attn: Attention, image: SizeHook | None) -> bool:
    """Whether a plain Attention may merge; outside of a known image's transformer only with a processor that is known
    to compute plain self-attention, since what others do with the tokens can't be told.
    """
    plain = image is not None or type(attn.processor).__name__ in PLAIN_PROCESSORS
    return plain and fixed_reason(attn) is None and _in_space(path)


def _in_space(path: str) -> bool:
    """Whether the tokens of a module are one image's, not one pixel's over frames."""
    return _TEMPORAL.isdisjoint(path.split("."))


def _is_on(hook: Any) -> bool:
    """Whether the settings in force need this hook."""
    return not isinstance(hook, PartHook) or hook.on


def _nothing_found(root: nn.Module) -> str:
    """The error for a model in which nothing can merge: what was looked for, what is there, what to do."""
    kinds = Counter(type(m).__name__ for m in root.modules() if type(m).__name__.endswith("Attention"))
    found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "no attention modules"
    return (
        f"expected a UNet's self-attention (diffusers' Attention without added keys, not over frames) or a transformer "
        f"that is known ({', '.join(family_names())}), found none that can merge in {type(root).__name__}, which has "
        f"{found}. Apply to a UNet such as pipe.unet, or describe the model with mame_sd.diffusion.families.family.register_family"
    )
