"""LoRAs on a loaded pipeline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mame_sd.errors import UserError, first_line
from mame_sd.runs.model_files import HUB_ID, digest_of


def _lora_scale(lora: str) -> tuple[str, float]:
    """PATH_OR_ID and scale of one --lora. Raises UserError for a scale that is no finite number."""
    source, mark, scale = lora.rpartition(":")
    if not mark or os.path.exists(lora):
        return lora, 1.0
    try:
        value = float(scale)
    except ValueError:
        return lora, 1.0
    if value != value or value in (float("inf"), float("-inf")):
        raise UserError(
            f"--lora {lora}: expected a finite scale after the colon, got {scale}; give one such"
            " as 0.8"
        )
    return source, value


def add_loras(pipe: Any, loras: Sequence[str], offline: bool = False) -> None:
    """Load each PATH_OR_ID[:SCALE] of `loras` and switch all of them on.

    Raises:
        UserError: not found, made for another model, PEFT missing.
    """
    for index, lora in enumerate(loras):
        _add_lora(pipe, lora, index, offline)
    if len(loras) > 1:
        pipe.set_adapters(
            [f"lora{i}" for i in range(len(loras))], [_lora_scale(lora)[1] for lora in loras]
        )


def lora_identity(lora: str) -> dict[str, Any]:
    """JSON values that tell this LoRA and its scale from others."""
    source, scale = _lora_scale(lora)
    path = Path(source)
    return {
        "name": path.name if os.path.exists(path) else source,
        "scale": scale,
        "sha256": digest_of(path) if os.path.exists(path) else None,
    }


def _add_lora(pipe: Any, lora: str, index: int, offline: bool) -> None:
    source, scale = _lora_scale(lora)
    if not hasattr(pipe, "load_lora_weights"):
        raise UserError(
            f"--lora {source}: expected a pipeline that takes LoRAs, got {type(pipe).__name__};"
            " leave it out"
        )
    path = Path(source)
    if not source or (not os.path.exists(path) and not HUB_ID.fullmatch(source)):
        raise UserError(
            f"--lora {source}: expected a .safetensors file, a folder or a hub id, found nothing;"
            " check the path"
        )
    where: dict[str, Any] = {"weight_name": path.name} if path.is_file() else {}
    try:
        pipe.load_lora_weights(
            str(path.parent) if path.is_file() else source,
            adapter_name=f"lora{index}",
            local_files_only=offline,
            **where,
        )
        pipe.set_adapters(f"lora{index}", scale)
    except Exception as error:  # PEFT missing, foreign keys, wrong shapes, unreachable hub
        hint = (
            "pip install peft" if "PEFT" in str(error) else "check that it was made for this model"
        )
        raise UserError(
            f"--lora {source}: expected a LoRA for {type(pipe).__name__}, but {first_line(error)};"
            f" {hint}"
        ) from error
