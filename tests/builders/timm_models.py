"""timm's models, also if torchvision can't be imported.

timm imports torchvision for its data and one norm, but torchvision's wheels fit one build of torch.
"""

from __future__ import annotations

import enum
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
from torch import nn

MODULES = (
    "datasets",
    "models",
    "models.feature_extraction",
    "ops",
    "ops.misc",
    "transforms",
    "transforms.functional",
    "utils",
)


class _StandIn(ModuleType):
    """A module that has every name, each a class that does nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":
            modes = "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS"
            return enum.Enum(name, modes)
        kind = type(name, (nn.BatchNorm2d if name == "FrozenBatchNorm2d" else object,), {})
        setattr(self, name, kind)
        return kind


@contextmanager
def torchvision_stand_in() -> Iterator[None]:
    """Modules that stand in for torchvision, where it can't be imported, for a `with` block."""
    try:
        importlib.import_module("torchvision.transforms")
    except (ImportError, RuntimeError):  # not there, or of another build of torch
        pass
    else:
        yield
        return
    names = ["torchvision", *(f"torchvision.{name}" for name in MODULES)]
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if name in names}
    for name in names:
        sys.modules[name] = module = _StandIn(name)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)


def _timm_models() -> Any:
    """timm.models; None where timm is not installed, which CI does not let pass."""
    try:
        with torchvision_stand_in():
            return importlib.import_module("timm.models")
    except ModuleNotFoundError as error:
        if error.name != "timm" or os.environ.get("CI"):
            raise
        return None


TIMM_MODELS = _timm_models()
NEEDS_TIMM = pytest.mark.skipif(
    TIMM_MODELS is None, reason="timm is not installed (pip install --no-deps timm)"
)
