"""What merging would cost and change in each layer of a model, and the choice for each layer that
follows.

`measure` replays a few calls of the denoiser that were recorded without merging. In each
self-attention that could merge it computes every form (fields of `MaMeConfig`) beside the unmerged
attention. It notes the relative squared error of the output, and the seconds on this device. How
much a layer's error matters is seen at the denoiser's output, where one form merges in that layer
alone.

`choose` then gives each layer one form. Of all choices that save enough seconds it takes the one
whose errors at the output have the least sum. That is a knapsack, which dynamic programming solves
exactly on a grid of seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from mame_sd.config import MaMeConfig
from mame_sd.diffusion.hook_registry import hook_on, put_hook, take_hook
from mame_sd.diffusion.hooks import MergeHook
from mame_sd.diffusion.layer import LayerCall, merged_call
from mame_sd.report import LayerStats, device_of

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a denoiser
Name = TypeVar("Name", bound=Hashable)  # of a layer, or of a layer in one of several steps
Clock = Callable[[], float]
# What a layer may be given beside nothing, in the words of `layers`.
FORMS: tuple[dict[str, Any], ...] = tuple(
    {"keep": keep, "fit_queries": queries}
    for keep in (0.5, 0.25, 0.125, 0.0625)
    for queries in (0, 32, 64, 128)
)
# the form that tells how much a layer matters
REFERENCE = {"keep": 0.125, "fit_queries": 0}
AT = (
    0.15,
    0.45,
    0.8,
)  # where in an image's calls of the denoiser is measured: 0 the first, 1 the last
GRID = 2000  # steps of the grid of seconds
FORWARDS = 200  # of the denoiser in a calibration, with those of its images, as far as can be


class Merging(Protocol):
    """What calibration needs of a `MaMeHandle`."""

    @property
    def root(self) -> nn.Module:
        """The denoiser."""

    @property
    def config(self) -> MaMeConfig:
        """The settings now in force."""

    @property
    def layers(self) -> Sequence[tuple[nn.Module, MergeHook]]:
        """The modules that may merge, each with its hook."""

    @property
    def described(self) -> str:
        """The model in words."""


@dataclass
class Measured:
    """One layer: seconds of the unmerged attention, and by number of the form errors and seconds;
    one entry for each call.

    `effect`: the error of the denoiser's output where the form REFERENCE merges in this layer
    alone, in the calls in which that was tried.
    `own`: the error of the layer's output in the same calls.
    """

    unmerged: list[float] = field(default_factory=list)
    effect: list[float] = field(default_factory=list)
    seconds: dict[int, list[float]] = field(default_factory=dict)
    errors: dict[int, list[float]] = field(default_factory=dict)
    own: list[float] = field(default_factory=list)


@dataclass
class Measurement:
    """What calls of a denoiser took without merging, in seconds, and what was measured in each of
    its layers, of which `forms`.
    """

    forms: list[dict[str, Any]] = field(default_factory=lambda: list(map(dict, FORMS)))
    forward: list[float] = field(default_factory=list)
    layers: dict[str, Measured] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measurement:
        """What `to_dict` gave, also after JSON has made texts of its numbers."""
        layers = {}
        for name, found in values["layers"].items():
            seconds, errors = (
                {int(n): list(v) for n, v in found[what].items()} for what in ("seconds", "errors")
            )
            unmerged, effect, own = (list(found[what]) for what in ("unmerged", "effect", "own"))
            layers[name] = Measured(unmerged, effect, seconds, errors, own)
        return cls(list(values["forms"]), list(values["forward"]), layers)

    def add(self, other: Measurement) -> None:
        """Take in what was measured on further calls, of the same forms."""
        self.forward += other.forward
        for name, found in other.layers.items():
            mine = self.layers.setdefault(name, Measured())
            mine.unmerged += found.unmerged
            mine.effect += found.effect
            mine.own += found.own
            for known, more in ((mine.seconds, found.seconds), (mine.errors, found.errors)):
                for number, values in more.items():
                    known.setdefault(number, []).extend(values)


@dataclass(frozen=True)
class Option:
    """What a layer may do: a `rule` of `layers`, and what it is reckoned to cost.

    Attributes:
        error: relative squared error of the denoiser's output.
        seconds: of the layer in one call of the denoiser.
    """

    rule: Any  # fields of MaMeConfig, or False: unmerged
    error: float
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """What calibration found for one model.

    Attributes:
        base: the settings that forms stand over.
        described: the model in words, see `MaMeHandle.described`.
        forward: seconds of a call of the denoiser without merging.
        options: what each layer may do, the first of them: stay unmerged.
        about: how it was found, as JSON values; for the file.
    """

    base: MaMeConfig
    described: str
    forward: float
    options: dict[str, list[Option]]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def fastest(self) -> float:
        """How many times as fast as unmerged the denoiser is reckoned to be with each layer's
        fastest option.
        """
        return self.reckoned(
            {name: min(found, key=lambda o: o.seconds) for name, found in self.options.items()}
        )

    def choose(self, speed: float) -> dict[str, Option]:
        """The option for each layer of the least sum of errors, with which the denoiser is reckoned
        to be `speed` times as fast as unmerged.

        Raises:
            ValueError: `speed` is no number above 1, or more than these options give.
        """
        check_speed(speed)
        chosen = choose(self.options, self.forward * (1 - 1 / speed))
        if chosen is None:
            raise ValueError(
                f"speed: expected at most {self.fastest:.2f}, which merging is reckoned to give"
                f" this model here, got {speed:g}"
            )
        return chosen

    def config(self, speed: float) -> MaMeConfig:
        """The settings of `choose`."""
        rules = {name: option.rule for name, option in self.choose(speed).items()}
        return self.base.replace(layers=rules, made_for=self.described)

    def save(self, path: str | PathLike[str], speed: float, **about: Any) -> None:
        """Writes the settings for `speed` as a file that `apply_mame` and `--config` take; `about`
        says more of them.

        Raises ValueError as `choose`.
        """
        config = self.config(speed).to_dict(given_only=True)
        text = json.dumps({**config, "about": {**self.about, "speed": speed, **about}}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def table(self, speed: float) -> str:
        """The choice for `speed` as text, a line for each layer."""
        chosen = self.choose(speed)
        width = max(map(len, chosen))
        lines = [f"{'layer':<{width}}  takes                    error     ms  unmerged"]
        for name, option in chosen.items():
            unmerged = self.options[name][0].seconds
            lines.append(
                f"{name:<{width}}  {in_words(option.rule):<20} {option.error:8.1e}"
                f" {1e3 * option.seconds:6.1f}  {1e3 * unmerged:8.1f}"
            )
        lines.append(f"reckoned {self.reckoned(chosen):.2f} times as fast as unmerged")
        return "\n".join(lines)

    def reckoned(self, chosen: Mapping[str, Option]) -> float:
        """How many times as fast as unmerged a call of the denoiser is with these options."""
        saved = sum(
            self.options[name][0].seconds - option.seconds for name, option in chosen.items()
        )
        return self.forward / max(self.forward - saved, 1e-12)


class Single(MergeHook):
    """Merges a layer by one form, whatever the settings are, and counts nothing."""

    def __init__(self, hook: MergeHook, form: MaMeConfig) -> None:
        super().__init__(
            hook.shared, LayerStats(hook.stats.name), hook.layer, hook.known, int(hook.number)
        )
        self._form = form

    def around(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's output, merged."""
        call = self.layer.call(module, forward, args, kwargs)
        return self.merged(call, self._form, self.stats)

    def merged(self, call: LayerCall, form: MaMeConfig, stats: LayerStats) -> Any:
        """The output of `call`, merged by `form` as in the step of the model's call around it."""
        step = self.told()._replace(plans=None)
        return merged_call(self.layer, call, self.tokens(), form, stats, lambda: step)


class Probe(Single):
    """Computes the unmerged attention, whose output goes on, and every form beside it."""

    def __init__(
        self, hook: MergeHook, forms: Sequence[MaMeConfig], measured: Measured, clock: Clock
    ) -> None:
        super().__init__(hook, forms[0])
        self._forms, self._measured, self._clock = forms, measured, clock

    def around(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's own output; the forms in which the layer can't merge have no entry."""
        call = self.layer.call(module, forward, args, kwargs)
        unmerged, seconds = _timed(call.run, self._clock)
        self._measured.unmerged.append(seconds)
        for number, form in enumerate(self._forms):
            stats = LayerStats(self.stats.name)
            merged, seconds = _timed(partial(self.merged, call, form, stats), self._clock)
            if stats.last_reason is None:
                self._measured.seconds.setdefault(number, []).append(seconds)
                self._measured.errors.setdefault(number, []).append(
                    relative_error(merged, unmerged)
                )
        return unmerged


@torch.no_grad()
def measure(
    handle: Merging,
    calls: Sequence[Call],
    clock: Clock | None = None,
    forms: Sequence[dict[str, Any]] = FORMS,
    tried: Callable[[int, int, int], bool] = lambda call, layer, layers: True,
) -> Measurement:
    """Replay `calls` of the handle's denoiser; gives what each form changes and costs in each
    layer.

    Args:
        handle: of `apply_mame`; its settings decide on what forms leave open.
        calls: of the denoiser without merging, see `recorded`.
        clock: seconds; by default the device's (`clock_of`).
        forms: what is tried in each layer, in the words of `layers`.
        tried: says in which call which of how many layers merges alone, which costs a forward.

    Raises:
        ValueError: no layer could merge.
    """
    clock = clock or clock_of(device_of(handle.root))
    base = handle.config.replace(layers=None)
    found = Measurement(list(map(dict, forms)))
    configs = [base.replace(**form) for form in forms]

    def probe(hook: MergeHook) -> Probe:
        return Probe(hook, configs, found.layers.setdefault(hook.stats.name, Measured()), clock)

    for number, (args, kwargs) in enumerate(calls):
        run = partial(handle.root, *args, **kwargs)
        with hooks_replaced(handle, lambda hook: None):
            if number == 0:
                run()  # warm-up
            output, seconds = _timed(run, clock)
        found.forward.append(seconds)
        with hooks_replaced(handle, probe):
            run()
        merging = {name: layer for name, layer in found.layers.items() if layer.seconds}
        for at, (name, layer) in enumerate(merging.items()):
            if tried(number, at, len(merging)):
                reference = _reference(layer, found.forms)
                with hooks_replaced(handle, partial(_alone, name=name, form=configs[reference])):
                    layer.effect.append(relative_error(run(), output))
                layer.own.append(layer.errors[reference][-1])
    found.layers = {name: layer for name, layer in found.layers.items() if layer.seconds}
    if not found.layers:
        raise ValueError(
            "calibrate: expected a layer that could merge, found none; lower min_tokens, or make"
            " larger images"
        )
    return found


def calls_of(handle: Merging, run: Callable[[], object]) -> list[Call]:
    """The calls of the handle's denoiser for an image that `run` makes, without merging."""
    with hooks_replaced(handle, lambda hook: None), recorded(handle.root) as calls:
        run()
    return calls


def measure_image(
    handle: Merging, run: Callable[[], object], number: int = 0, images: int = 1
) -> Measurement:
    """`measure` on some calls of image `number` of so many, which `run` makes.

    Each layer merges alone in as many of these calls as `FORWARDS` allows. At least these are the
    late and the middle one of one image: they tell nearly as much as all three do.
    """
    every = calls_of(handle, run)
    calls = some(every)
    left = FORWARDS - images * (len(every) + 2 * len(calls) + 1)  # 1: the warm-up

    def tried(call: int, layer: int, layers: int) -> bool:
        each = min(max(left // layers, 2), images * len(calls))
        before = (number - layer) % images * len(calls)  # of other images, which come first
        return before + len(calls) - 1 - call < each

    return measure(handle, calls, tried=tried)


def calibration_of(handle: Merging, found: Measurement, about: Mapping[str, Any]) -> Calibration:
    """What follows from a measurement of the handle's model."""
    said = {
        "device": _device_name(device_of(handle.root)),
        "forward_s": round(median(found.forward), 4),
        **about,
    }
    base = handle.config.replace(layers=None, made_for=None)
    return Calibration(base, handle.described, median(found.forward), options(found), said)


def clock_of(device: torch.device) -> Clock:
    """Seconds for what runs on `device`.

    On a CPU they are CPU seconds, which other programs hardly change. On other devices they are
    wall seconds, read when the device has done its work.
    """
    if device.type == "cpu":
        return time.process_time
    backend: Any = getattr(torch, device.type)

    def clock() -> float:
        backend.synchronize()
        return time.perf_counter()

    return clock


def check_speed(speed: Any) -> None:
    """Raises ValueError for what is no number above 1."""
    if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not 1 < speed < np.inf:
        raise ValueError(f"speed: expected a number above 1, got {speed!r}")


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that JSON holds as they are."""
    return {
        name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Call]]:
    """Keeps the calls of `model` in the block."""
    calls: list[Call] = []
    latest: dict[
        int, tuple[Any, int, Tensor]
    ] = {}  # the same prompt's embeddings come in every call

    def kept(value: Any) -> Any:
        """A tensor as it is now: schedulers change theirs in place."""
        if not isinstance(value, Tensor):
            return value
        version = -1 if value.is_inference() else value._version
        same, at, copy = latest.get(id(value), (None, -1, value))
        if same is not value or at != version or version < 0:
            copy = value.clone()
        now[id(value)] = value, version, copy
        return copy

    now: dict[int, tuple[Any, int, Tensor]] = {}

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(
            (tuple(map(kept, args)), {name: kept(value) for name, value in kwargs.items()})
        )
        latest.clear()
        latest.update(now)
        now.clear()

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def some(calls: Sequence[Call]) -> list[Call]:
    """Those of an image's calls at which is measured."""
    return [calls[number] for number in sorted({round(at * (len(calls) - 1)) for at in AT})]


def options(found: Measurement) -> dict[str, list[Option]]:
    """What each layer may do: stay unmerged, or take a form that saves seconds.

    Seconds are medians, but means for a `tau`, whose cost depends on each call's tokens. Errors are
    means, weighted by how much the layer's error matters for the denoiser's output.
    """
    result: dict[str, list[Option]] = {}
    for name, layer in found.layers.items():
        unmerged = median(layer.unmerged)
        matters = float(np.mean(layer.effect)) / max(float(np.mean(layer.own)), 1e-30)
        result[name] = [Option(False, 0.0, unmerged)]
        for number, seconds in layer.seconds.items():
            form = found.forms[number]
            taken = float(np.mean(seconds)) if "tau" in form else median(seconds)
            option = Option(dict(form), matters * float(np.mean(layer.errors[number])), taken)
            if option.seconds < unmerged:
                result[name].append(option)
    return result


def _reference(layer: Measured, forms: Sequence[dict[str, Any]]) -> int:
    """The number of the form that tells how much a layer matters: REFERENCE, or the first where
    that can't be.
    """
    return next((n for n in layer.seconds if forms[n] == REFERENCE), min(layer.seconds))


def _alone(hook: MergeHook, name: str, form: MaMeConfig) -> MergeHook | None:
    return Single(hook, form) if hook.stats.name == name else None


def choose(options: Mapping[Name, Sequence[Option]], saved: float) -> dict[Name, Option] | None:
    """The option for each layer whose errors have the least sum of all that save at least `saved`
    seconds; None: none do.
    """
    names = list(options)
    most = sum(
        max(o.seconds for o in found) - min(o.seconds for o in found) for found in options.values()
    )
    unit = max(most, 1e-12) / GRID
    need = max(0, int(np.ceil(saved / unit - 1e-9)))
    if need > GRID:
        return None
    best = np.full(
        need + 1, np.inf
    )  # least sum of errors by units saved; the last entry: all that is needed, or more
    best[0] = 0.0
    steps: list[
        tuple[np.ndarray, np.ndarray]
    ] = []  # of each layer, by units saved: the option, and the units before it
    for name in names:
        unmerged = max(o.seconds for o in options[name])
        after = np.full(need + 1, np.inf)
        taken, origin = np.zeros(need + 1, int), np.zeros(need + 1, int)
        for number, option in enumerate(options[name]):
            gain = min(int((unmerged - option.seconds) / unit), need)
            reached = np.full(need + 1, np.inf)
            reached[gain:] = best[: need + 1 - gain] + option.error
            sources = np.arange(need + 1) - gain
            last = (
                need - gain + int(np.argmin(best[need - gain :]))
            )  # all that reach the end or pass it
            reached[need], sources[need] = best[last] + option.error, last
            better = reached < after
            after[better], taken[better], origin[better] = reached[better], number, sources[better]
        best = after
        steps.append((taken, origin))
    if not np.isfinite(best[need]):  # each layer's gain was rounded down to the grid
        return _nearly_fastest(options, most - saved) if saved <= most else None
    chosen: dict[Name, Option] = {}
    units = need
    for name, (taken, origin) in zip(reversed(names), reversed(steps), strict=True):
        chosen[name] = options[name][taken[units]]
        units = origin[units]
    return {name: chosen[name] for name in names}


def _nearly_fastest(options: Mapping[Name, Sequence[Option]], spare: float) -> dict[Name, Option]:
    """Each layer's fastest option, but for those that fit into `spare` seconds more: the ones that
    take most off the sum of errors for each second.
    """
    chosen = {
        name: min(found, key=lambda o: (o.seconds, o.error)) for name, found in options.items()
    }
    while True:
        swaps = [
            (max(o.seconds - chosen[name].seconds, 0.0), chosen[name].error - o.error, name, o)
            for name, found in options.items()
            for o in found
            if o.error < chosen[name].error and o.seconds - chosen[name].seconds <= spare
        ]
        if not swaps:
            return chosen
        seconds, _, name, option = max(swaps, key=lambda swap: swap[1] / max(swap[0], 1e-12))
        spare -= seconds
        chosen[name] = option


def relative_error(merged: Any, unmerged: Any) -> float:
    """Squared error over squared norm, of all tensors of an output together: a tensor, a tuple or
    diffusers' output class.
    """
    pairs = list(zip(tensors_of(merged), tensors_of(unmerged), strict=True))
    if not pairs:
        raise TypeError(
            f"expected a tensor or a tuple or dict of tensors, got {type(unmerged).__name__}"
        )
    apart = sum(float((a.float() - b.float()).square().sum()) for a, b in pairs)
    return apart / max(sum(float(b.float().square().sum()) for _, b in pairs), 1e-30)


def in_words(rule: Any) -> str:
    """A rule as a table has it."""
    if rule is False:
        return "unmerged"
    if "tau" in rule:
        return f"tau {rule['tau']:g}"
    queries = rule.get("fit_queries")
    return f"{rule['keep']:.1%} of keys" + ("" if queries is None else f", {queries} queries")


def tensors_of(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, Mapping) else output
    return [part for part in parts if isinstance(part, Tensor)]


def _timed(call: Callable[[], Any], clock: Clock) -> tuple[Any, float]:
    start = clock()
    output = call()
    return output, clock() - start


@contextmanager
def hooks_replaced(
    handle: Merging, make: Callable[[MergeHook], MergeHook | None]
) -> Iterator[None]:
    """While entered, `make` replaces each self-attention's hook; None takes it off."""
    hooks = [(module, hook) for module, hook in handle.layers if hook_on(module, hook.name) is hook]
    try:
        for module, hook in hooks:
            take_hook(module, hook.name)
            made = make(hook)
            if made is not None:
                put_hook(module, made)
        yield
    finally:
        for module, hook in hooks:
            take_hook(module, hook.name)
            put_hook(module, hook)
