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
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from mame_sd.config import MaMeConfig
from mame_sd.diffusion.layer import LayerStats
from mame_sd.report import device_of

if TYPE_CHECKING:
    from mame_sd.diffusion.handle import MaMeHandle

Name = TypeVar("Name", bound=Hashable)
Form = dict[str, float]  # shares of a block, by field of `MaMeConfig`
Row = tuple[int, float, float]  # number of a form, seconds, error
ALL: Form = {"keep": 1.0, "mlp_keep": 1.0, "block_keep": 1.0}
# Forms that a block may get; the first one leaves it unmerged. Merging keys of a restored block as
# well gains no time.
FORMS: tuple[Form, ...] = (
    *(
        {**ALL, "keep": keep, "mlp_keep": mlp}
        for keep in (1.0, 0.5, 0.25, 0.125)
        for mlp in (1.0, 0.25, 0.125, 0.0625)
    ),
    *({**ALL, "block_keep": block} for block in (0.5, 0.25, 0.125)),
)
FIELD = {"attention": "keep", "mlp": "mlp_keep", "block": "block_keep"}  # by kind of layer
AT = (0.15, 0.45, 0.8)  # measured calls of an image: 0 is the first, 1 the last
# Errors of restored blocks count twice: over the steps of an image they add up more than those of
# keys and MLPs do, by 2 to 3 dB on the embedded transformer (docs/calibration.md).
BLOCK_WEIGHT = 2.0


@dataclass
class Measurement:
    """Measured numbers, as JSON values.

    Attributes:
        images: number of images.
        forward: seconds of the denoiser's calls without merging.
        blocks: for each block and call a row for each of `FORMS` that acts in full in the block.
            The error is that of the block's output.
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

    rule: Any
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
            {
                name: min(of_block, key=lambda o: o.seconds)
                for name, of_block in self.options.items()
            }
        )

    def choose(self, speed: float) -> dict[str, Option]:
        """Choose options with which the denoiser is estimated to be `speed` times as fast.

        Raises:
            ValueError: `speed` is not a number above 1, or these options can't reach it.
        """
        check_speed(speed)
        chosen = choose(self.options, self.forward * (1 - 1 / speed))
        if chosen is None:
            raise ValueError(
                f"speed: expected at most {self.fastest:.2f}, which merging is estimated to give"
                f" this model here, got {speed:g}; ask for less, or give larger images"
            )
        return chosen

    def config(self, speed: float) -> MaMeConfig:
        """Return the settings of `choose`."""
        rules = {name: option.rule for name, option in self.choose(speed).items()}
        return self.base.replace(layers=rules, calibrated_for=self.described)

    def text(self, speed: float) -> str:
        """Return the settings for `speed` as JSON that `apply_mame` and `--config` accept.

        All settings are in it, so that defaults of later versions don't change it.
        """
        config = {
            n: value for n, value in self.config(speed).to_dict().items() if value is not None
        }
        about = {**self.about, "speed": speed}
        return json.dumps({**config, "about": about}, indent=1) + "\n"

    def save(self, path: str | PathLike[str], speed: float) -> None:
        """Write the settings for `speed` to a file, see `text`."""
        Path(path).write_text(self.text(speed), encoding="utf-8")

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
def measure(handle: MaMeHandle, run: Callable[[], object], measurement: Measurement) -> None:
    """Measure what each form changes and costs in each block, in some calls of the denoiser.

    Each block merges alone in as many calls as one image has here. More of them hardly change what
    is chosen.

    Args:
        handle: the handle of the model. Its settings apply to everything that forms don't set.
        run: makes the next image.
        measurement: the measured numbers are added to it.

    Raises:
        ValueError: there are several denoisers, the settings have a tau, or no block could merge.
    """
    _check(handle)
    clock = clock_of(device_of(handle.root))
    base = handle.config.replace(layers=None, calibrated_for=None)  # which forms override
    forms = {number: base.replace(**FORMS[number]) for number in forms_of(handle)}
    for config in forms.values():
        with handle.using(config):  # installs all hooks before the first call
            pass
    blocks, stats = blocks_of(handle)
    rows: dict[str, list[Row]] = {}  # of the latest call

    def measure_forms(name: str, block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Measure the forms that act in full in a block which has run."""
        rows[name], again = [], partial(block.forward, *args, **kwargs)
        for number, config in forms.items():
            for one in stats[name]:
                one.reset()
            with handle.using(config) if number else handle.paused():
                merged, seconds = _timed(again, clock)
            acting = {FIELD[one.kind] for one in stats[name] if one.last_reason is None}
            if acting == _merges(number):
                rows[name].append((number, seconds, relative_error(merged, output)))

    with handle.paused():
        with recorded(handle.root) as calls:
            run()
        calls[0]()  # warm-up
    for at in sorted({round(at * (len(calls) - 1)) for at in AT}):
        with handle.paused():
            output, seconds = _timed(calls[at], clock)
        measurement.forward.append(seconds)
        rows.clear()
        with handle.using(forms[0]):  # not paused, so that the hooks note how tokens lie
            with ExitStack() as hooks:
                for name, block in blocks.items():
                    hook = partial(measure_forms, name)
                    hooks.enter_context(block.register_forward_hook(hook, with_kwargs=True))
                calls[at]()
            for name, measured in rows.items():
                if len(measured) == 1:  # no form acts in this block
                    continue
                measurement.blocks.setdefault(name, []).extend(measured)
                effects = measurement.effects.setdefault(name, [])
                if len(effects) < len(AT):
                    _, *merged = sorted(measured, key=lambda row: (row[0] > 0, row[2]))
                    number, _, error = merged[len(merged) // 2]
                    alone = {"*": False, name: FORMS[number]}
                    with handle.using(base, layers=alone):
                        effects.append((relative_error(calls[at](), output), error))
    handle.reset()
    if not measurement.blocks:
        raise ValueError(
            "calibrate: expected a layer that could merge, found none; lower min_tokens, or make"
            " larger images"
        )
    measurement.images += 1


def _check(handle: MaMeHandle) -> None:
    """Raise ValueError if a model with several denoisers or with a tau is to be calibrated."""
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


def _merges(number: int) -> set[str]:
    """Return the names of the settings by which form `number` merges or restores."""
    return {name for name, share in FORMS[number].items() if share < 1}


def forms_of(handle: MaMeHandle) -> list[int]:
    """Return the numbers of the forms that the model and the settings allow.

    `mlp_keep=1` or `block_keep=1` in the settings leaves MLPs or blocks out. Other values are
    chosen anew, as `keep` is.
    """
    able = {"keep", *(FIELD[h.stats.kind] for _, h in handle.restored if not h.never)}
    able -= {name for name in ("mlp_keep", "block_keep") if getattr(handle.config, name) == 1}
    return [number for number in range(len(FORMS)) if able >= _merges(number)]


def blocks_of(handle: MaMeHandle) -> tuple[dict[str, nn.Module], dict[str, list[LayerStats]]]:
    """Return the outermost blocks by name, and the counters of the layers in each.

    A self-attention outside of all blocks is a block of its own.
    """
    every = [(hook.stats, module) for module, hook in (*handle.restored, *handle.layers)]
    blocks: dict[str, nn.Module] = {}
    inside: dict[str, list[LayerStats]] = {}
    for stats, module in sorted(every, key=lambda pair: pair[0].name.count(".")):
        outer = next((name for name in blocks if f"{stats.name}.".startswith(f"{name}.")), None)
        if outer is None and stats.kind != "mlp":
            blocks[stats.name], outer = module, stats.name
        if outer is not None:
            inside.setdefault(outer, []).append(stats)
    return blocks, inside


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Callable[[], Any]]]:
    """Record the calls of `model` within a block, as functions that compute them again.

    Tensors are copied, because schedulers change theirs in place.
    """
    calls: list[Callable[[], Any]] = []

    def record(_: nn.Module, args: Any, kwargs: Any) -> None:
        args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
        calls.append(partial(model, *args, **kwargs))

    hook = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def calibrated(
    handle: MaMeHandle, measurement: Measurement, about: Mapping[str, Any]
) -> Calibration:
    """Estimate the cost of each block's options from measured numbers.

    Args:
        handle: the handle of the model.
        measurement: the measured numbers.
        about: description of the images, as JSON values.
    """
    device, forward = device_of(handle.root), median(measurement.forward)
    said = {
        "forward_s": round(forward, 4),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": str(torch.__version__),
        **about,
    }
    base = handle.config.replace(layers=None, calibrated_for=None)
    return Calibration(base, handle.described, forward, options(measurement), said)


def clock_of(device: torch.device) -> Callable[[], float]:
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
    """Raise ValueError if `speed` is not a number above 1."""
    if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not 1 < speed < math.inf:
        raise ValueError(f"speed: expected a number above 1, got {speed!r}")


def options(measurement: Measurement) -> dict[str, list[Option]]:
    """Return the options of each block: unmerged, and all forms that save seconds.

    Seconds are medians. Errors are means, weighted by the effect of the block's error on the
    denoiser's output.
    """
    result: dict[str, list[Option]] = {}
    for name, rows in measurement.blocks.items():
        effects, errors = zip(*measurement.effects[name], strict=True)
        matters = fmean(effects) / max(fmean(errors), 1e-30)
        for number in sorted({row[0] for row in rows}):
            seconds = median(row[1] for row in rows if row[0] == number)
            error = matters * fmean(row[2] for row in rows if row[0] == number)
            if number == 0:
                result[name] = [Option(False, 0.0, seconds)]
            elif seconds < result[name][0].seconds:
                weight = BLOCK_WEIGHT if "block_keep" in _merges(number) else 1.0
                result[name].append(Option(dict(FORMS[number]), weight * error, seconds))
    return result


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


def _timed(call: Callable[[], Any], clock: Callable[[], float]) -> tuple[Any, float]:
    start = clock()
    output = call()
    return output, clock() - start
