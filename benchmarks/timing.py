"""What figures were made on, and the rows that an option names."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import torch

PACKAGES = ("torch", "diffusers", "tomesd", "mame-sd")


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
