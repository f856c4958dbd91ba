"""Settings that lie beside a model's weights, which merging takes where nothing else is given.

A pipeline's folder may hold `mame.json` (`config.SETTINGS_FILE`), a file of settings such as
calibration writes. The embedded models have one.
"""

from __future__ import annotations

from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from mame_sd.config import SETTINGS_FILE, MaMeConfig


def resolved(model: nn.Module, config: MaMeConfig) -> MaMeConfig:
    """`config`; where it gives no tau, keep or layers, over settings beside the weights that
    `model`, or a part of it, was loaded from, if there are some.

    Raises:
        ValueError: a file that can't be used.
    """
    own: Any = getattr(model, "config", None)
    place = own.get("_name_or_path") if isinstance(own, dict) else None
    if config.layers is None and config.is_open and isinstance(place, (str, PathLike)) and place:
        for folder in (Path(place), Path(place).parent):  # the denoiser's own, and the pipeline's
            if (folder / SETTINGS_FILE).is_file():
                return _read(folder / SETTINGS_FILE).replace(**config.given)
    return config


def uniform(config: MaMeConfig) -> MaMeConfig:
    """`config`, the same in all layers: without settings beside the model's weights."""
    return config.replace(keep=config.keep, tau=config.tau, layers=None, made_for=None)


@cache
def _read(path: Path) -> MaMeConfig:
    return MaMeConfig.from_file(path)
