"""Read settings that are saved with a model.

A pipeline's folder may hold `mame.json` (`config.SETTINGS_FILE`), a file of settings such as
calibration writes. Merging uses it if no other settings are given. The folder of a
StableDiffusionMaMePipeline holds its settings in an entry of model_index.json that diffusers
ignores. That file names StableDiffusionPipeline, so that diffusers alone can load the folder.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from mame_sd.config import SETTINGS_FILE, MaMeConfig, check_names

DEFAULT = "default"
ENTRY = "_mame"  # in model_index.json; diffusers ignores names with a leading underscore


def resolved(model: nn.Module, config: MaMeConfig) -> MaMeConfig:
    """Return `config`, over settings saved next to the model's weights.

    The model, or each denoiser of an nn.ModuleDict, was loaded from a folder. Settings with a tau,
    keep or layers are returned as they are.

    Raises:
        ValueError: a file of settings is wrong.
    """
    if config.layers is not None or not config.is_default:
        return config
    parts = list(model.values()) if isinstance(model, nn.ModuleDict) else [model]
    folders: list[Path] = []
    for part in parts:
        model_config: Any = getattr(part, "config", None)
        place = model_config.get("_name_or_path") if isinstance(model_config, dict) else None
        if isinstance(place, (str, PathLike)) and place:
            folders += [Path(place)] if len(parts) == 1 else []  # the denoiser's folder
            folders.append(Path(place).parent)  # the pipeline's folder
    for folder in folders:
        if (folder / SETTINGS_FILE).is_file():
            return MaMeConfig.from_file(folder / SETTINGS_FILE).replace(**config.given)
    return config


def resolve_setting(
    tau: float | str | None, keep: float | None, fields: dict[str, Any] | None
) -> MaMeConfig | None:
    """Return the settings for (tau, keep, further fields), or None for off.

    Args:
        tau: a number, None or "default".
        keep: a share or None.
        fields: further fields of MaMeConfig.

    Raises:
        ValueError: a setting is unknown or out of its range, or both tau and keep are given.
    """
    if tau == DEFAULT:
        return MaMeConfig.from_dict(fields or {})
    if isinstance(tau, str):
        raise ValueError(f"tau: expected a number, None (off) or {DEFAULT!r}, got {tau!r}")
    if tau is not None and keep is not None:
        raise ValueError(
            f"expected tau or keep, got both (tau={tau!r}, keep={keep!r}). Drop one; where one of"
            " them was saved with the pipeline, give it as None"
        )
    if tau is None and keep is None:  # off: without a method only names can be checked
        check_names(fields or {})
        return None
    return MaMeConfig.from_dict({**(fields or {}), "tau": tau, "keep": keep})
