"""Measure what merging costs and changes in each layer of a model, and choose settings by layer.

`measure` replays a few of an image's calls of the denoiser. Each self-attention computes every form
(fields of `MaMeConfig`) next to the unmerged output. A layer's errors are weighted by their effect
on the denoiser's output, measured with one form merging in that layer alone. `choose` picks a form
for each layer such that enough seconds are saved and the sum of all weighted errors is smallest.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from mame_sd.config import MaMeConfig
from mame_sd.diffusion.layer import LayerCall, MergeHook, merged_call
from mame_sd.report import LayerStats, device_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a call of the denoiser
Name = TypeVar("Name", bound=Hashable)
Clock = Callable[[], float]
Row = tuple[int | None, float, float]  # number of a form (None if unmerged), seconds, error
# Settings that a layer may get, as in `MaMeConfig.layers`.
FORMS: tuple[dict[str, Any], ...] = tuple(
    {"keep": keep, "fit_queries": queries}
    for keep in (0.5, 0.25, 0.125, 0.0625)
    for queries in (0, 32, 64, 128)
)
REFERENCE = FORMS.index({"keep": 0.125, "fit_queries": 0})  # weights a layer's errors
AT = (0.15, 0.45, 0.8)  # measured calls of an image: 0 is the first, 1 the last
FORWARDS = 200  # largest number of denoiser calls in a calibration, if possible
STATES = 20_000  # largest number of choices during the search


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
    def layers(self) -> Sequence[tuple[nn.Module, MergeHook]]:
        """Return the self-attentions, each with its hook."""

    @property
    def described(self) -> str:
        """Return a description of the model."""

    def using(self, *, mlp_keep: float, block_keep: float) -> AbstractContextManager[None]:
        """Change settings of this task for a block."""


@dataclass
class Measurement:
    """Measured numbers, as JSON values.

    Attributes:
        images: number of images.
        forward: seconds of the denoiser's calls without merging.
        layers: for each layer a row for each call, unmerged and for each of `FORMS` that merges.
            The error is that of the layer's output.
        effects: for each layer the errors of the denoiser's output and of the layer's output, with
            one form merging in this layer alone.
    """

    images: int = 0
    forward: list[float] = field(default_factory=list)
    layers: dict[str, list[Row]] = field(default_factory=dict)
    effects: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Option:
    """A choice for a layer, with its estimated cost.

    Attributes:
        rule: fields of MaMeConfig, or False to leave the layer unmerged.
        error: relative squared error of the denoiser's output.
        seconds: time of the layer in one call of the denoiser.
    """

    rule: Any  # fields of MaMeConfig, or False
    error: float
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """The result of calibrating one model.

    Attributes:
        base: the settings that the forms override.
        described: description of the model, see `MaMeHandle.described`.
        forward: seconds of a call of the denoiser without merging.
        options: the options of each layer. The first leaves the layer unmerged.
        about: how the calibration was made, as JSON values for the file.
    """

    base: MaMeConfig
    described: str
    forward: float
    options: dict[str, list[Option]]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def fastest(self) -> float:
        """Return the estimated speed with each layer's fastest option."""
        return self.reckoned(
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
                "speed: merging is reckoned to make this model no faster here; leave it unmerged,"
                " or give larger images"
            )
        if chosen is None:
            raise ValueError(
                f"speed: expected at most {self.fastest:.2f}, which merging is reckoned to give"
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
        """Return the choice for `speed` as text, one line for each layer."""
        chosen = self.choose(speed)
        width = max(map(len, chosen))
        lines = [f"{'layer':<{width}}  takes                         error     ms  unmerged"]
        for name, option in chosen.items():
            unmerged = self.options[name][0].seconds
            rule = option.rule
            takes = f"{rule['keep']:.1%} of keys, {rule['fit_queries']} queries" if rule else "all"
            lines.append(
                f"{name:<{width}}  {takes:<26} {option.error:8.1e}"
                f" {1e3 * option.seconds:6.1f}  {1e3 * unmerged:8.1f}"
            )
        lines.append(f"reckoned {self.reckoned(chosen):.2f} times as fast as unmerged")
        return "\n".join(lines)

    def reckoned(self, chosen: Mapping[str, Option]) -> float:
        """Return the estimated speed of the denoiser with these options, relative to unmerged."""
        saved = sum(
            self.options[name][0].seconds - option.seconds for name, option in chosen.items()
        )
        return self.forward / max(self.forward - saved, 1e-12)


@torch.no_grad()
def measure(
    handle: Merging, run: Callable[[], object], found: Measurement, images: int = 1
) -> None:
    """Measure what each form changes and costs in each layer, in some calls of the denoiser.

    Each layer merges alone in as many of these calls as `FORWARDS` allows, but at least in the late
    and the middle call of one image, which tell nearly as much as all three calls.

    Args:
        handle: the handle of the model. Its settings apply to everything that forms don't set.
        run: makes the next image.
        found: the measured numbers are added to it.
        images: number of images of the whole calibration.

    Raises:
        ValueError: no layer could merge.
    """
    clock = clock_of(device_of(handle.root))
    base = handle.config.replace(layers=None)
    forms = [base.replace(**form) for form in FORMS]
    with layers_run(handle), recorded(handle.root) as every:
        run()
    calls = [every[n] for n in sorted({round(at * (len(every) - 1)) for at in AT})]
    left = FORWARDS - images * (len(every) + 2 * len(calls) + 1)  # 1 is the warm-up

    def tried(call: int, layer: int, layers: int) -> bool:
        """Return True if a layer merges alone in a call, which costs a forward."""
        each = min(max(left // layers, 2), images * len(calls))
        before = (found.images - layer) % images * len(calls)  # other images come first
        return before + len(calls) - 1 - call < each

    def every_form(hook: MergeHook, call: LayerCall) -> Any:
        """Return the unmerged output. Forms in which the layer can't merge add no row."""
        rows = found.layers.setdefault(hook.stats.name, [])
        unmerged, seconds = _timed(call.run, clock)
        rows.append((None, seconds, 0.0))
        for number, form in enumerate(forms):
            stats = LayerStats(hook.stats.name)
            merged, seconds = _timed(partial(_merged, hook, call, form, stats), clock)
            if stats.last_reason is None:
                rows.append((number, seconds, relative_error(merged, unmerged)))
        return unmerged

    def alone(hook: MergeHook, call: LayerCall, name: str, form: MaMeConfig) -> Any:
        merges = hook.stats.name == name
        return _merged(hook, call, form, LayerStats(name)) if merges else call.run()

    for number, (args, kwargs) in enumerate(calls):
        again = partial(handle.root, *args, **kwargs)
        with layers_run(handle):
            if number == 0:
                again()  # warm-up
            output, seconds = _timed(again, clock)
        found.forward.append(seconds)
        with layers_run(handle, every_form):
            again()
        for name in [name for name, rows in found.layers.items() if _forms(rows) == [None]]:
            del found.layers[name]
        for at, (name, rows) in enumerate(found.layers.items()):
            if tried(number, at, len(found.layers)):
                own = {form: error for form, _, error in rows if form is not None}  # the latest
                form = REFERENCE if REFERENCE in own else min(own)
                with layers_run(handle, partial(alone, name=name, form=forms[form])):
                    error = relative_error(again(), output)
                found.effects.setdefault(name, []).append((error, own[form]))
    if not found.layers:
        raise ValueError(
            "calibrate: expected a layer that could merge, found none; lower min_tokens, or make"
            " larger images"
        )
    found.images += 1


@contextmanager
def layers_run(
    handle: Merging, run: Callable[[MergeHook, LayerCall], Any] = lambda _, call: call.run()
) -> Iterator[None]:
    """Compute the calls of all layers by `run` within a block, whatever the settings are.

    By default they are computed unmerged. Nothing is restored, and nothing is counted.

    Args:
        handle: the handle of the model.
        run: computes the call of a layer from its hook and the call.
    """
    hooks = [hook for _, hook in handle.layers]
    try:
        for hook in hooks:
            hook.instead = partial(run, hook)
        with handle.using(mlp_keep=1, block_keep=1):
            yield
    finally:
        for hook in hooks:
            hook.instead = None


def _merged(hook: MergeHook, call: LayerCall, form: MaMeConfig, stats: LayerStats) -> Any:
    """Compute a call, merged by a form, with the step of the model's call around it.

    Args:
        hook: hook of the layer.
        call: the call.
        form: the settings.
        stats: counters of the call.

    Returns:
        The layer's output.
    """
    step = hook.step()._replace(plans=None)
    kernel = hook.shared.kernel
    return merged_call(hook.layer, call, hook.layout(), form, stats, lambda: step, kernel)


def measure_images(
    handle: Merging,
    runs: Sequence[Callable[[], object]],
    about: Mapping[str, Any],
    kept_in: str | PathLike[str] | None = None,
    on_image: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Measure on one image for each of `runs`, and estimate the cost of each layer's options.

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
            another kind, or no layer could merge.
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
    base = handle.config.replace(layers=None, calibrated_for=None)
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
    if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not 1 < speed < np.inf:
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
    """Return the options of each layer: unmerged, and all forms that save seconds.

    Seconds are medians. Errors are means, weighted by the effect of the layer's error on the
    denoiser's output.
    """
    result: dict[str, list[Option]] = {}
    for name, rows in found.layers.items():
        effects, own = zip(*found.effects[name], strict=True)
        matters = fmean(effects) / max(fmean(own), 1e-30)
        for form in _forms(rows):
            seconds = median(row[1] for row in rows if row[0] == form)
            if form is None:
                result[name] = [Option(False, 0.0, seconds)]
            elif seconds < result[name][0].seconds:
                error = matters * fmean(row[2] for row in rows if row[0] == form)
                result[name].append(Option(dict(FORMS[form]), error, seconds))
    return result


def _forms(rows: Sequence[Row]) -> list[int | None]:
    """Return the numbers of forms in a layer's rows. None, which means unmerged, comes first."""
    return sorted({number for number, *_ in rows}, key=lambda n: -1 if n is None else n)


def choose(options: Mapping[Name, Sequence[Option]], saved: float) -> dict[Name, Option] | None:
    """Choose options with the smallest sum of errors that save at least `saved` seconds.

    Layers are added one by one to the choices so far. Only choices with a smaller error than all
    choices that save as much are kept, and at most `STATES` of them.

    Returns:
        The option of each layer, or None if no choice saves so much.
    """
    gained, lost = np.zeros(1), np.zeros(1)  # one number for each choice so far
    kept: list[np.ndarray] = []  # by layer, indices into (earlier choices x options)
    for found in options.values():
        gains = gained[:, None] + [found[0].seconds - o.seconds for o in found]
        losses = lost[:, None] + [o.error for o in found]
        order = np.lexsort((losses.ravel(), -gains.ravel()))  # choices that save most come first
        least = np.minimum.accumulate(losses.ravel()[order])
        keep = order[np.append(True, least[1:] < least[:-1])]
        if len(keep) > STATES:
            keep = keep[np.linspace(0, len(keep) - 1, STATES).round().astype(int)]
        gained, lost = gains.ravel()[keep], losses.ravel()[keep]
        kept.append(keep)
    enough = np.flatnonzero(gained >= saved * (1 - 1e-9))
    if not len(enough):
        return None
    at = int(enough[-1])  # the last one has the smallest error
    chosen: dict[Name, Option] = {}
    for name, keep in zip(reversed(list(options)), reversed(kept), strict=True):
        at, number = divmod(int(keep[at]), len(options[name]))
        chosen[name] = options[name][number]
    return {name: chosen[name] for name in options}


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
