"""Latency and peak memory of several methods on one model, interleaved round by round.

Rounds and their order decide what a slow minute of the machine does: each round times every method once, and the order
turns by one a round, so drift spreads over all of them. A warm-up call of each method comes first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from mame_sd.generate import environment
from mame_sd.hooks import denoiser_of
from mame_sd.models import LoadedModel
from mame_sd.plan import GenerateSettings, Job
from mame_sd.run_folder import write_atomically
from mame_sd.sampling import sample

from .methods import Method

WARM_UP_STEPS = 2
_DECODING = "mame-sd: decoding"
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Timing:
    """One call: seconds an image in all and in denoising, peak bytes in all and in denoising, weights included.

    None: not measured (a pipeline without a decoder; in a timed call, memory on other than CUDA).
    """

    seconds: float
    denoising: float | None = None
    allocated: int | None = None
    allocated_denoising: int | None = None


def bench(
    model: LoadedModel,
    settings: GenerateSettings,
    jobs: Sequence[Job],
    methods: Sequence[Method],
    rounds: int,
    record: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[Timing]]:
    """Time one batch of `jobs` with every method, `rounds` times over; by method, in order of rounds.

    Args:
        record: JSON lines that hold every timing as soon as it is taken. A stopped call continues from the last whole
            round in them. Were they taken of anything else (prompts, methods and their settings, model, machine), it
            starts over.
    """
    about = {
        "environment": environment(model),
        "model": model.identity,
        "settings": asdict(settings),
        "jobs": [asdict(job) for job in jobs],
        "methods": {method.name: method.config for method in methods},
    }
    done = _read_record(record, about)
    open_calls = [
        (number, method)
        for number in range(rounds)
        for method in _turned(methods, number)
        if (number, method.name) not in done
    ]
    on_progress(len(done), rounds * len(methods))
    peaks: dict[str, Timing] = {}
    for method in {method.name: method for _, method in open_calls}.values():
        timed_call(model, replace(settings, steps=min(WARM_UP_STEPS, settings.steps)), jobs, method)
        if model.pipe.device.type == "cpu":  # CUDA counts while it is timed, the CPU in a call of its own
            peaks[method.name] = peak_call(model, replace(settings, steps=1), jobs, method)
    for number, method in open_calls:
        timing = timed_call(model, settings, jobs, method)
        if method.name in peaks:
            peak = peaks[method.name]
            timing = replace(timing, allocated=peak.allocated, allocated_denoising=peak.allocated_denoising)
        done[number, method.name] = timing
        _write_record(record, about, done)
        on_progress(len(done), rounds * len(methods))
    return {m.name: [done[number, m.name] for number in range(rounds)] for m in methods}


def summary(timings: Sequence[Timing]) -> dict[str, dict[str, Any]]:
    """The cost metrics of one method: median and quartiles of seconds, the highest peak of memory."""
    found: dict[str, dict[str, Any]] = {}
    for name, field in (("latency", "seconds"), ("denoising", "denoising")):
        values = [getattr(timing, field) for timing in timings if getattr(timing, field) is not None]
        if values:
            low, mean, high = (float(value) for value in np.quantile(values, [0.25, 0.5, 0.75]))
            found[name] = {"mean": mean, "low": low, "high": high, "n": len(values), "statistic": "median, quartiles"}
    for name, field in (("memory", "allocated"), ("memory_denoising", "allocated_denoising")):
        peaks = [getattr(timing, field) for timing in timings if getattr(timing, field) is not None]
        if peaks:
            found[name] = {"mean": max(peaks) / MEBIBYTE, "low": None, "high": None, "n": len(peaks)}
    return found


def timed_call(model: LoadedModel, settings: GenerateSettings, jobs: Sequence[Job], method: Method) -> Timing:
    """One call of the pipeline with `method` installed, on a device that has nothing else to do."""
    device = model.pipe.device
    marks: dict[str, float] = {}
    peak: dict[str, int] = {}

    def at(name: str) -> None:
        if name not in marks:
            _synchronize(device)
            marks[name] = time.perf_counter()
            if name == "decoding" and device.type == "cuda":
                peak["denoising"] = torch.cuda.max_memory_allocated(device)

    with installed(model, method, jobs), _marking(model, at):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        _synchronize(device)
        start = time.perf_counter()
        sample(model, settings, jobs)
        _synchronize(device)
        seconds = time.perf_counter() - start
    denoising = (marks["decoding"] - marks["denoising"]) / len(jobs) if "decoding" in marks else None
    if device.type != "cuda":
        return Timing(seconds / len(jobs), denoising)
    return Timing(seconds / len(jobs), denoising, torch.cuda.max_memory_allocated(device), peak.get("denoising"))


def peak_call(model: LoadedModel, settings: GenerateSettings, jobs: Sequence[Job], method: Method) -> Timing:
    """Peak memory of one call on the CPU, from the profiler's record of every allocation; its seconds mean nothing."""

    def at(name: str) -> None:
        if name == "decoding":
            with record_function(_DECODING):
                pass

    with (
        installed(model, method, jobs),
        _marking(model, at),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found,
    ):
        sample(model, settings, jobs)
    profiler = found.profiler
    assert profiler is not None
    assert profiler.kineto_results is not None
    alive = peak = 0
    before_decoding: int | None = None
    for event in sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == _DECODING and before_decoding is None:
            before_decoding = peak
        elif event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    weights = _weight_bytes(model)
    denoising = None if before_decoding is None else weights + before_decoding
    return Timing(0.0, allocated=weights + peak, allocated_denoising=denoising)


@contextmanager
def installed(model: LoadedModel, method: Method, jobs: Sequence[Job]) -> Iterator[Any]:
    """`method` on the model for a block, ready for `jobs`; gives the patched model, None for the baseline."""
    patched = None if method.patch is None else method.patch.install(model)
    try:
        if patched is not None:
            patched.begin(jobs)
        yield patched
    finally:
        if patched is not None:
            patched.remove()


@contextmanager
def _marking(model: LoadedModel, at: Callable[[str], None]) -> Iterator[None]:
    """Call `at` with "denoising" before each call of the denoiser and "decoding" before each of the decoder."""
    decoder = getattr(getattr(model.pipe, "vae", None), "decoder", None)
    parts: list[tuple[str, nn.Module]] = [("denoising", denoiser_of(model.pipe))]
    if isinstance(decoder, nn.Module):
        parts.append(("decoding", decoder))
    hooks = [part.register_forward_pre_hook(lambda *_, name=name: at(name)) for name, part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _turned(methods: Sequence[Method], number: int) -> list[Method]:
    turn = number % len(methods)
    return [*methods[turn:], *methods[:turn]]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _weight_bytes(model: LoadedModel) -> int:
    modules = [part for part in model.pipe.components.values() if isinstance(part, nn.Module)]
    tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _read_record(path: Path, about: Mapping[str, Any]) -> dict[tuple[int, str], Timing]:
    """Timings taken before under the same circumstances, by (round, method); whole rounds alone, so that all interleave."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return {}
    if not lines or lines[0] != json.loads(json.dumps(about)):
        return {}
    found = {(line.pop("round"), line.pop("method")): Timing(**line) for line in lines[1:]}
    return {key: timing for key, timing in found.items() if all((key[0], name) in found for name in about["methods"])}


def _write_record(path: Path, about: Mapping[str, Any], done: Mapping[tuple[int, str], Timing]) -> None:
    rows = [{"round": number, "method": name, **asdict(timing)} for (number, name), timing in done.items()]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in [about, *rows]).encode())
