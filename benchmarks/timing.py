"""Interleaved timing of functions, each call on an input that none has seen; what the figures were
made on.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

import mame_sd.eval.timing as timing

PACKAGES = ("torch", "diffusers", "tomesd", "mame-sd")


@dataclass(frozen=True)
class Times:
    """Seconds of one method, one entry a round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return timing.quartiles(self.seconds)[1]

    @property
    def quartiles(self) -> tuple[float, float]:
        low, _, high = timing.quartiles(self.seconds)
        return low, high

    def to_dict(self) -> dict[str, Any]:
        return {"median_s": self.median, "quartiles_s": self.quartiles, "rounds": len(self.seconds)}

    def __str__(self) -> str:
        low, high = self.quartiles
        return f"{1e3 * self.median:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})"


def interleaved(
    methods: Mapping[str, Callable[[Any], object]],
    make_input: Callable[[], Any],
    rounds: int,
    device: torch.device,
    warm_up: int = 1,
    around: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
) -> dict[str, Times]:
    """Seconds of each method over `rounds` rounds, after `warm_up` calls of each that don't count.

    Args:
        methods: what is timed, by name; each is called with one input.
        make_input: makes an input, outside of the clock; called anew for every call.
        around: a context that a method runs in, entered and left outside of the clock.
    """

    def call(name: str, number: int = -1) -> float:
        given = make_input()
        with around(name):
            return timing.timed(lambda: methods[name](given), device)[1]

    def warm(name: str) -> None:
        for _ in range(warm_up):
            call(name)

    found = [
        seconds for _, seconds in timing.interleaved(list(methods), rounds, call, warm_up=warm)
    ]
    return {name: Times(tuple(seconds[name] for seconds in found)) for name in methods}


def captured(plain: float, ours: float, free: float) -> float:
    """How much of what the free bound saves arrives: (T_plain - T_ours) / (T_plain - T_free)."""
    return (plain - ours) / (plain - free)


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were made on: device, threads and versions."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **versions,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def named(text: str, names: Iterable[str]) -> list[str]:
    """What `--only TEXT` chooses: the method of that name alone, else all whose names hold the
    text.
    """
    return [text] if text in names else [name for name in names if text in name]
