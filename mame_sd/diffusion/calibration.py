"""Measure what merging and restoring cost and change in each block, and choose settings by block.

`measure` replays a few of an image's calls of the denoiser. Each block computes every form (shares
of its keys, of its MLP's tokens and of its own tokens) next to the unmerged output. A block's
errors are weighted by their effect on the denoiser's output, measured with one form in that block
alone. `choose` picks a form for each block such that enough seconds are saved and the sum of all
weighted errors is small.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from mame_sd.config import MaMeConfig
from mame_sd.diffusion.layer import LayerHook
from mame_sd.diffusion.restoring import RestoreHook
from mame_sd.report import LayerStats, device_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a call of the denoiser
Name = TypeVar("Name", bound=Hashable)
Clock = Callable[[], float]
Form = dict[str, float]  # shares of a block, by field of `MaMeConfig`
Row = tuple[int | None, float, float]  # number of a form (None if unmerged), seconds, error
ALL: Form = {"keep": 1.0, "mlp_keep": 1.0, "block_keep": 1.0}
# Forms that a block may get. Merging keys of a restored block as well gains no time.
FORMS: tuple[Form, ...] = (
    *(
        {**ALL, "keep": keep, "mlp_keep": mlp}
        for keep in (1.0, 0.5, 0.25, 0.125)
        for mlp in (1.0, 0.25, 0.125, 0.0625)
        if keep < 1 or mlp < 1
    ),
    *({**ALL, "block_keep": block} for block in (0.5, 0.25, 0.125)),
)
FIELD = {"attention": "keep", "mlp": "mlp_keep", "block": "block_keep"}  # by kind of layer
AT = (0.15, 0.45, 0.8)  # measured calls of an image: 0 is the first, 1 the last
# Errors of restored blocks count twice: over the steps of an image they add up more than those of
# keys and MLPs do, by 2 to 3 dB on the embedded transformer (docs/calibration.md).
BLOCK_WEIGHT = 2.0
FORWARDS = 200  # largest number of denoiser calls in a calibration, if possible


class Merging(Protocol):
    """The part of a `MaMeHandle` that calibration needs.

    A protocol avoids a circular import.
    """

    @property
    def root(self) -> nn.Module:
        """Return the model."""

    @property
    def config(self) -> MaMeConfig:
        """Return the settings in force."""

    @property
    def layers(self) -> Sequence[tuple[nn.Module, LayerHook]]:
        """Return the self-attentions, each with its hook."""

    @property
    def restored(self) -> Sequence[tuple[nn.Module, RestoreHook]]:
        """Return the MLPs and blocks that may be restored, each with its hook."""

    @property
    def described(self) -> str:
        """Return a description of the model."""

    def using(self, config: MaMeConfig) -> AbstractContextManager[None]:
        """Change the settings of this task within a block."""

    def paused(self) -> AbstractContextManager[None]:
        """Compute everything unmerged in this task within a block."""

    def reset(self) -> None:
        """Set all counters to zero."""


@dataclass
class Measurement:
    """Measured numbers, as JSON values.

    Attributes:
        images: number of images.
        forward: seconds of the denoiser's calls without merging.
        blocks: for each block a row for each call, unmerged and for each of `FORMS` that acts in
            it. The error is that of the block's output.
        effects: for each block the errors of the denoiser's output and of the block's output, with
            one form in this block alone.
    """

    images: int = 0
    forward: list[float] = field(default_factory=list)
    blocks: dict[str, list[Row]] = field(default_factory=dict)
    effects: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Option:
    """A choice for a block, with its estimated cost.

    Attributes:
        rule: fields of MaMeConfig, or False to leave the block unmerged.
        error: relative squared error of the denoiser's output.
        seconds: time of the block in one call of the denoiser.
    """

    rule: Any  # fields of MaMeConfig, or False
    error: float
    seconds: float

    def __str__(self) -> str:
        shares = self.rule or {}
        nouns = {"keep": "keys", "mlp_keep": "MLP", "block_keep": "block"}
        parts = [f"{noun} {shares[of]:.1%}" for of, noun in nouns.items() if shares.get(of, 1) < 1]
        return ", ".join(parts) or "all"


@dataclass(frozen=True)
class Calibration:
    """The result of calibrating one model.

    Attributes:
        base: the settings that the forms override.
        described: description of the model, see `MaMeHandle.described`.
        forward: seconds of a call of the denoiser without merging.
        options: the options of each block. The first leaves the block unmerged.
        about: how the calibration was made, as JSON values for the file.
    """

    base: MaMeConfig
    described: str
    forward: float
    options: dict[str, list[Option]]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def fastest(self) -> float:
        """Return the estimated speed with each block's fastest option."""
        return self.estimated(
            {name: min(found, key=lambda o: o.seconds) for name, found in self.options.items()}
        )

    def choose(self, speed: float) -> dict[str, Option]:
        """Choose options with which the denoiser is estimated to be `speed` times as fast.

        Raises:
            ValueError: `speed` is no number above 1, or these options can't reach it.
        """
        check_speed(speed)
        chosen = choose(self.options, self.forward * (1 - 1 / speed))
        if chosen is None and self.fastest < 1.005:
            raise ValueError(
                "speed: merging is estimated to make this model no faster here; leave it unmerged,"
                " or give larger images"
            )
        if chosen is None:
            raise ValueError(
                f"speed: expected at most {self.fastest:.2f}, which merging is estimated to give"
                f" this model here, got {speed:g}; ask for less"
            )
        return chosen

    def config(self, speed: float) -> MaMeConfig:
        """Return the settings of `choose`."""
        rules = {name: option.rule for name, option in self.choose(speed).items()}
        return self.base.replace(layers=rules, calibrated_for=self.described)

    def save(self, path: str | PathLike[str], speed: float, **about: Any) -> None:
        """Write the settings for `speed` to a file that `apply_mame` and `--config` accept.

        Args:
            path: the file.
            speed: the wanted speed, see `choose`.
            about: further entries that describe the settings.

        Raises:
            ValueError: as for `choose`.
        """
        config = self.config(speed).to_dict(given_only=True)
        text = json.dumps({**config, "about": {**self.about, "speed": speed, **about}}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def table(self, speed: float) -> str:
        """Return the choice for `speed` as text, one line for each block."""
        chosen = self.choose(speed)
        width = max(map(len, chosen))
        lines = [f"{'block':<{width}}  computes                      error     ms  unmerged"]
        for name, option in chosen.items():
            unmerged = self.options[name][0].seconds
            lines.append(
                f"{name:<{width}}  {option!s:<26} {option.error:8.1e}"
                f" {1e3 * option.seconds:6.1f}  {1e3 * unmerged:8.1f}"
            )
        lines.append(f"estimated {self.estimated(chosen):.2f} times as fast as unmerged")
        return "\n".join(lines)

    def estimated(self, chosen: Mapping[str, Option]) -> float:
        """Return the estimated speed of the denoiser with these options, relative to unmerged."""
        saved = sum(
            self.options[name][0].seconds - option.seconds for name, option in chosen.items()
        )
        return self.forward / max(self.forward - saved, 1e-12)


@torch.no_grad()
def measure(
    handle: Merging, run: Callable[[], object], found: Measurement, images: int = 1
) -> None:
    """Measure what each form changes and costs in each block, in some calls of the denoiser.

    Each block merges alone in as many of these calls as `FORWARDS` allows, but at least in the late
    and the middle call of one image, which tell nearly as much as all three calls.

    Args:
        handle: the handle of the model. Its settings apply to everything that forms don't set.
        run: makes the next image.
        found: the measured numbers are added to it.
        images: number of images of the whole calibration.

    Raises:
        ValueError: no block could merge.
    """
    clock = clock_of(device_of(handle.root))
    base = base_of(handle.config)
    unmerged = base.replace(**ALL)
    forms = {number: base.replace(**FORMS[number]) for number in forms_of(handle)}
    for config in forms.values():
        with handle.using(config):  # so that all hooks are there before the first call
            pass
    blocks = blocks_of(handle)
    with handle.paused(), recorded(handle.root) as every:
        run()
    calls = [every[n] for n in sorted({round(at * (len(every) - 1)) for at in AT})]
    left = FORWARDS - images * (len(every) + 2 * len(calls) + 1)  # 1 is the warm-up

    def is_measured(call: int, block: int, count: int) -> bool:
        """Return True if a block merges alone in a call, which costs a forward."""
        each = min(max(left // count, 2), images * len(calls))
        before = (found.images - block) % images * len(calls)  # other images come first
        return before + len(calls) - 1 - call < each

    def every_form(name: str, forward: Callable[[], Any], output: Any) -> None:
        """Measure all forms of a block. A form that does not act in full adds no row."""
        rows, stats = found.blocks.setdefault(name, []), blocks[name][1]
        with handle.paused():
            rows.append((None, _timed(forward, clock)[1], 0.0))
        for number, config in forms.items():
            for one in stats:
                one.reset()
            with handle.using(config):
                merged, seconds = _timed(forward, clock)
            acting = {FIELD[one.kind] for one in stats if one.last_reason is None}
            if acting == {of for of, share in FORMS[number].items() if share < 1}:
                rows.append((number, seconds, relative_error(merged, output)))

    def alone(_: str, forward: Callable[[], Any], __: Any, config: MaMeConfig) -> Any:
        with handle.using(config):
            return forward()

    for number, (args, kwargs) in enumerate(calls):
        again = partial(handle.root, *args, **kwargs)
        with handle.paused():
            if number == 0:
                again()  # warm-up
            output, seconds = _timed(again, clock)
        found.forward.append(seconds)
        with handle.using(unmerged):  # not paused, so that the hooks note how tokens lie
            with watched(blocks, every_form, blocks):
                again()
            for name in [name for name, rows in found.blocks.items() if _forms(rows) == [None]]:
                del found.blocks[name]
            for at, (name, rows) in enumerate(found.blocks.items()):
                if is_measured(number, at, len(found.blocks)):
                    errors = {form: error for form, _, error in rows if form is not None}  # latest
                    form = sorted(errors, key=errors.__getitem__)[len(errors) // 2]
                    with watched(blocks, partial(alone, config=forms[form]), [name]):
                        error = relative_error(again(), output)
                    found.effects.setdefault(name, []).append((error, errors[form]))
    handle.reset()
    if not found.blocks:
        raise ValueError(
            "calibrate: expected a layer that could merge, found none; lower min_tokens, or make"
            " larger images"
        )
    found.images += 1


def base_of(config: MaMeConfig) -> MaMeConfig:
    """Return the settings that forms override, which belong to no layer and no model."""
    return config.replace(layers=None, calibrated_for=None)


def forms_of(handle: Merging) -> list[int]:
    """Return the numbers of the forms that the model and the settings allow.

    `mlp_keep=1` or `block_keep=1` in the settings leaves MLPs or blocks out. Other values are
    chosen anew, as `keep` is.
    """
    able = {"keep", *(FIELD[h.stats.kind] for _, h in handle.restored if not h.never)}
    able -= {of for of in ("mlp_keep", "block_keep") if getattr(handle.config, of) == 1}
    return [n for n, form in enumerate(FORMS) if able >= {of for of in form if form[of] < 1}]


def blocks_of(handle: Merging) -> dict[str, tuple[nn.Module, list[LayerStats]]]:
    """Return the outermost blocks by name, each with the counters of its layers.

    A self-attention outside of all blocks is a block of its own.
    """
    every = [*((m, h) for m, h in handle.restored if h.stats.kind == "block"), *handle.layers]
    blocks: dict[str, tuple[nn.Module, list[LayerStats]]] = {}
    for module, hook in sorted(every, key=lambda pair: pair[1].stats.name.count(".")):
        outer = any(hook.stats.name.startswith(f"{name}.") for name in blocks)
        if not outer:
            blocks[hook.stats.name] = (module, [])
    for _, hook in (*handle.layers, *handle.restored):
        for name, (_, stats) in blocks.items():
            if f"{hook.stats.name}.".startswith(f"{name}."):
                stats.append(hook.stats)
    return blocks


@contextmanager
def watched(
    blocks: Mapping[str, tuple[nn.Module, Any]],
    run: Callable[[str, Callable[[], Any], Any], Any],
    names: Iterable[str],
) -> Iterator[None]:
    """Call `run` whenever one of some blocks has run.

    Args:
        blocks: the blocks by name.
        run: called with the block's name, a function that computes the call again, and its output.
            What it returns replaces the output, unless it is None.
        names: names of the blocks to watch.
    """

    def watch(name: str, module: nn.Module) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return run(name, partial(module.forward, *args, **kwargs), output)

        return module.register_forward_hook(hook, with_kwargs=True)

    hooks = [watch(name, blocks[name][0]) for name in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def measure_images(
    handle: Merging,
    runs: Sequence[Callable[[], object]],
    about: Mapping[str, Any],
    kept_in: str | PathLike[str] | None = None,
    on_image: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Measure on one image for each of `runs`, and estimate the cost of each block's options.

    Args:
        handle: the handle of `apply_mame`.
        runs: functions that make an image each.
        about: description of the images and the weights, as JSON values. Nothing else distinguishes
            two trainings of one architecture.
        kept_in: file of measured numbers, so that an interrupted calibration resumes with the next
            image. A file for other images, another model, device or version is started anew.
        on_image: called with (number of finished images, number of images).

    Returns:
        The calibration.

    Raises:
        ValueError: there are several denoisers, the settings have a tau, `kept_in` is a file of
            another kind, or no block could merge.
    """
    if isinstance(handle.root, nn.ModuleDict):
        raise ValueError(
            "calibrate: expected a pipeline with one denoiser, got one with"
            f" {' and '.join(handle.root)}; give settings of layers by hand"
        )
    if handle.config.method != "keys":
        raise ValueError(
            "calibrate: expected no tau, for it tries shares of keys to keep, got"
            f" tau={handle.config.tau:g}; set keep first"
        )
    device = device_of(handle.root)
    said = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": str(torch.__version__),
        **about,
    }
    mark = json.loads(json.dumps([said, handle.described, handle.config.to_dict(), FORMS]))
    found = _kept(kept_in, mark)
    for run in runs[found.images :]:
        on_image(found.images, len(runs))
        measure(handle, run, found, len(runs))
        if kept_in is not None:
            part = Path(f"{os.fspath(kept_in)}.part")
            part.unlink(missing_ok=True)  # don't write through a link
            with part.open("x", encoding="utf-8") as file:
                json.dump({"about": mark, **asdict(found)}, file)
            part.replace(kept_in)
    on_image(len(runs), len(runs))
    base = base_of(handle.config)
    forward = median(found.forward)
    said = {"forward_s": round(forward, 4), **said}
    return Calibration(base, handle.described, forward, options(found), said)


def read_measurement(file: str | PathLike[str]) -> tuple[Any, Measurement] | None:
    """Return the mark and the numbers that an earlier call measured, or None if there is no file.

    Raises:
        ValueError: the file is of another kind.
    """
    path = Path(file)
    if not os.path.lexists(path):
        return None
    try:
        if not path.is_file():  # reading a pipe might never end
            raise ValueError("no file")
        values = json.loads(path.read_bytes())
        mark = values.pop("about")
        return mark, Measurement(**values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected none, or what an earlier calibration measured, got another file"
            f" ({type(error).__name__}: {str(error)[:60]}); choose another, or take it away"
        ) from None


def _kept(file: str | PathLike[str] | None, mark: Any) -> Measurement:
    """Return the numbers that an earlier call with the same mark measured, or no numbers."""
    there = None if file is None else read_measurement(file)
    return there[1] if there is not None and there[0] == mark else Measurement()


def clock_of(device: torch.device) -> Clock:
    """Return a clock in seconds for work on `device`.

    On a CPU it counts CPU seconds, which other programs hardly change. On other devices it counts
    wall seconds, and is read after the device has finished its work.
    """
    if device.type == "cpu":
        return time.process_time
    backend: Any = getattr(torch, device.type)

    def clock() -> float:
        backend.synchronize()
        return time.perf_counter()

    return clock


def check_speed(speed: Any) -> None:
    """Raise ValueError if `speed` is no number above 1."""
    if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not 1 < speed < math.inf:
        raise ValueError(f"speed: expected a number above 1, got {speed!r}")


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Arguments]]:
    """Record the calls of `model` within a block.

    Tensors are copied, because schedulers change theirs in place.
    """
    calls: list[Arguments] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(tree_map_only(Tensor, torch.clone, (args, kwargs)))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def options(found: Measurement) -> dict[str, list[Option]]:
    """Return the options of each block: unmerged, and all forms that save seconds.

    Seconds are medians. Errors are means, weighted by the effect of the block's error on the
    denoiser's output.
    """
    result: dict[str, list[Option]] = {}
    for name, rows in found.blocks.items():
        effects, errors = zip(*found.effects[name], strict=True)
        matters = fmean(effects) / max(fmean(errors), 1e-30)
        for form in _forms(rows):
            seconds = median(row[1] for row in rows if row[0] == form)
            if form is None:
                result[name] = [Option(False, 0.0, seconds)]
            elif seconds < result[name][0].seconds:
                weight = matters * (BLOCK_WEIGHT if FORMS[form]["block_keep"] < 1 else 1)
                error = weight * fmean(row[2] for row in rows if row[0] == form)
                result[name].append(Option(dict(FORMS[form]), error, seconds))
    return result


def _forms(rows: Sequence[Row]) -> list[int | None]:
    """Return the numbers of forms in a block's rows. None, which means unmerged, comes first."""
    return sorted({number for number, *_ in rows}, key=lambda n: -1 if n is None else n)


def choose(options: Mapping[Name, Sequence[Option]], saved: float) -> dict[Name, Option] | None:
    """Choose options that save at least `saved` seconds, with a small sum of errors.

    Beginning with all unmerged, one block after the other changes its option: the change that adds
    the least error for each second saved, of those seconds that are still to be saved.

    Returns:
        The option of each block, or None if no choice saves so much.
    """
    chosen = {name: found[0] for name, found in options.items()}
    left = saved * (1 - 1e-9)
    while left > 0:
        changes = [
            ((option.error - now.error) / min(now.seconds - option.seconds, left), name, option)
            for name, now in chosen.items()
            for option in options[name]
            if option.seconds < now.seconds
        ]
        if not changes:
            return None
        _, name, option = min(changes, key=lambda change: change[0])
        left -= chosen[name].seconds - option.seconds
        chosen[name] = option
    return chosen


def relative_error(merged: Any, unmerged: Any) -> float:
    """Return the squared error over the squared norm, of all tensors of an output together.

    An output is a tensor, a tuple or diffusers' output class.
    """
    outputs = (tree_leaves(output) for output in (merged, unmerged))
    pairs = [pair for pair in zip(*outputs, strict=True) if isinstance(pair[1], Tensor)]
    if not pairs:
        raise TypeError(f"expected an output with tensors in it, got {type(unmerged).__name__}")
    apart = sum(float((a.float() - b.float()).square().sum()) for a, b in pairs)
    return apart / max(sum(float(b.float().square().sum()) for _, b in pairs), 1e-30)


def _timed(call: Callable[[], Any], clock: Clock) -> tuple[Any, float]:
    start = clock()
    output = call()
    return output, clock() - start
