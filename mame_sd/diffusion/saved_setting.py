"""Settings that are saved with a model.

A pipeline's folder may hold `mame.json` (`config.SETTINGS_FILE`), a file of settings such as
calibration writes: merging takes it where nothing else is given. That of a
StableDiffusionMaMePipeline holds its merging in model_index.json, in an entry that diffusers passes
over. The file names StableDiffusionPipeline, so that diffusers alone can load the folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from mame_sd.config import SETTINGS_FILE, MaMeConfig, check_names

DEFAULT = "default"
ENTRY = "_mame"  # of model_index.json: diffusers passes over names with a leading underscore


def resolved(model: nn.Module, config: MaMeConfig) -> MaMeConfig:
    """`config`; where it gives no tau, keep or layers, over settings beside the weights that
    `model`, or the denoisers in an nn.ModuleDict, were loaded from, if there are some.

    Raises:
        ValueError: a file that can't be used.
    """
    if config.layers is not None or not config.is_open:
        return config
    parts = list(model.values()) if isinstance(model, nn.ModuleDict) else [model]
    folders: list[Path] = []
    for part in parts:
        own: Any = getattr(part, "config", None)
        place = own.get("_name_or_path") if isinstance(own, dict) else None
        if isinstance(place, (str, PathLike)) and place:
            folders += [Path(place)] if len(parts) == 1 else []  # the denoiser's own
            folders.append(Path(place).parent)  # the pipeline's
    for folder in folders:
        if (folder / SETTINGS_FILE).is_file():
            return MaMeConfig.from_file(folder / SETTINGS_FILE).replace(**config.given)
    return config


def uniform(config: MaMeConfig) -> MaMeConfig:
    """`config`, the same in all layers: without settings beside the model's weights."""
    keys = {} if config.tau is not None else {"keep": config.keep, "mlp_keep": config.mlp_share}
    return config.replace(**keys, layers=None, made_for=None)


@dataclass(frozen=True)
class SavedMerging:
    """Merging as saved with a pipeline: `config` and whether it is on (off: what further fields
    give when turned on).
    """

    config: MaMeConfig
    on: bool

    def __str__(self) -> str:
        given = ", ".join(f"{name} {value}" for name, value in self.config.given.items())
        return (given or "the default") if self.on else "off"


def resolve_setting(
    tau: float | str | None, keep: float | None, fields: dict[str, Any] | None
) -> MaMeConfig | None:
    """The settings that (tau, keep, further fields) mean; None is off.

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
    if tau is None and keep is None:  # off: what goes with neither can't be checked
        check_names(fields or {})
        return None
    return MaMeConfig.from_dict({**(fields or {}), "tau": tau, "keep": keep})


def read_saved_merging(folder: Path) -> SavedMerging | None:
    """The merging saved in a pipeline's folder; None for any other pipeline than ours.

    Raises:
        ValueError: settings that can't be.
    """
    saved = json.loads((folder / "model_index.json").read_text(encoding="utf-8")).get(ENTRY)
    if saved is None:
        return None
    fields = saved.get("mame_config") or {}
    config = resolve_setting(saved.get("tau", DEFAULT), saved.get("keep"), fields)
    return SavedMerging(
        MaMeConfig.from_dict(fields) if config is None else config, config is not None
    )
