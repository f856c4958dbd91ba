"""Load LoRAs into a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mame_sd.errors import UserError, first_line
from mame_sd.runs.model_files import read_lora


def add_loras(pipe: Any, loras: Sequence[str], offline: bool = False) -> None:
    """Load LoRAs into a pipeline, and switch all of them on.

    Args:
        pipe: the pipeline.
        loras: the LoRAs, as `read_lora` takes them.
        offline: if True, the hub is never asked.

    Raises:
        UserError: one is made for another model, or PEFT is missing.
    """
    scales = {}
    for number, (source, scale) in enumerate(map(read_lora, loras)):
        path, scales[f"lora{number}"] = Path(source), scale
        where: dict[str, Any] = {"weight_name": path.name} if path.is_file() else {}
        place = str(path.parent) if path.is_file() else source
        try:
            pipe.load_lora_weights(
                place, adapter_name=f"lora{number}", local_files_only=offline, **where
            )
            pipe.set_adapters(list(scales), list(scales.values()))
        except Exception as error:  # PEFT missing, foreign keys, wrong shapes, unreachable hub
            peft = "PEFT" in str(error)
            hint = "pip install peft" if peft else "check that it was made for this model"
            raise UserError(
                f"--lora {source}: expected a LoRA for {type(pipe).__name__}, but"
                f" {first_line(error)}; {hint}"
            ) from error
