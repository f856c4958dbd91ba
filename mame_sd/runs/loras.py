"""LoRAs on a loaded pipeline."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mame_sd.errors import UserError, first_line
from mame_sd.runs.model_files import HUB_ID, digest_of


def add_loras(pipe: Any, loras: Sequence[str], offline: bool = False) -> None:
    """Load each PATH_OR_ID[:SCALE] of `loras` and switch all of them on.

    Raises:
        UserError: not found, made for another model, PEFT missing.
    """
    scales = [_scale(lora)[1] for lora in loras]
    names = [f"lora{number}" for number in range(len(loras))]
    for name, lora in zip(names, loras, strict=True):
        _load(pipe, name, _scale(lora)[0], offline)
    if loras:
        pipe.set_adapters(names, scales)


def lora_identity(lora: str) -> dict[str, Any]:
    """JSON values that tell this LoRA and its scale from others."""
    source, scale = _scale(lora)
    path, there = Path(source), os.path.exists(source)
    return {
        "name": path.name if there else source,
        "scale": scale,
        "sha256": digest_of(path) if there else None,
    }


def _scale(lora: str) -> tuple[str, float]:
    """PATH_OR_ID and scale of one --lora. Raises UserError for a scale that is no finite number."""
    source, mark, scale = lora.rpartition(":")
    try:
        value = float(scale)
    except ValueError:
        return lora, 1.0
    if not mark or os.path.exists(lora):
        return lora, 1.0
    if not math.isfinite(value):
        raise UserError(
            f"--lora {lora}: expected a finite scale after the colon, got {scale}; give one such"
            " as 0.8"
        )
    return source, value


def _load(pipe: Any, name: str, source: str, offline: bool) -> None:
    if not hasattr(pipe, "load_lora_weights"):
        raise UserError(
            f"--lora {source}: expected a pipeline that takes LoRAs, got {type(pipe).__name__};"
            " leave it out"
        )
    if not source or (not os.path.exists(source) and not HUB_ID.fullmatch(source)):
        raise UserError(
            f"--lora {source}: expected a .safetensors file, a folder or a hub id, found nothing;"
            " check the path"
        )
    path = Path(source)
    where: dict[str, Any] = {"weight_name": path.name} if path.is_file() else {}
    place = str(path.parent) if path.is_file() else source
    try:
        pipe.load_lora_weights(place, adapter_name=name, local_files_only=offline, **where)
    except Exception as error:  # PEFT missing, foreign keys, wrong shapes, unreachable hub
        peft = "PEFT" in str(error)
        hint = "pip install peft" if peft else "check that it was made for this model"
        raise UserError(
            f"--lora {source}: expected a LoRA for {type(pipe).__name__}, but {first_line(error)};"
            f" {hint}"
        ) from error
