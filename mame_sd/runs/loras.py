"""LoRAs on a loaded pipeline."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mame_sd.errors import UserError, first_line
from mame_sd.runs.model_files import HUB_ID, name_and_digest


@dataclass(frozen=True)
class Lora:
    """A file, folder or hub id, and its scale."""

    source: str
    scale: float

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that tell this LoRA and its scale from others."""
        return {**name_and_digest(self.source), "scale": self.scale}


def read_lora(given: str) -> Lora:
    """The LoRA of one --lora PATH_OR_ID[:SCALE].

    Raises UserError for a scale that is no finite number, or a path where nothing is.
    """
    source, mark, text = given.rpartition(":")
    try:
        scale = float(text)
    except ValueError:
        mark = ""
    if not mark or os.path.exists(given):
        source, scale = given, 1.0
    if not math.isfinite(scale):
        raise UserError(
            f"--lora {given}: expected a finite scale after the colon, got {text}; give one such"
            " as 0.8"
        )
    if not os.path.exists(source) and not HUB_ID.fullmatch(source):
        raise UserError(
            f"--lora {source}: expected a .safetensors file, a folder or a hub id, found nothing;"
            " check the path"
        )
    return Lora(source, scale)


def add_loras(pipe: Any, loras: Sequence[Lora], offline: bool = False) -> None:
    """Load the LoRAs and switch all of them on.

    Raises:
        UserError: made for another model, PEFT missing.
    """
    names = [f"lora{number}" for number in range(len(loras))]
    for name, lora in zip(names, loras, strict=True):
        _load(pipe, name, lora.source, offline)
    if loras:
        pipe.set_adapters(names, [lora.scale for lora in loras])


def _load(pipe: Any, name: str, source: str, offline: bool) -> None:
    if not hasattr(pipe, "load_lora_weights"):
        raise UserError(
            f"--lora {source}: expected a pipeline that takes LoRAs, got {type(pipe).__name__};"
            " leave it out"
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
