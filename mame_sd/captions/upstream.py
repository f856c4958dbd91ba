"""Names of transformers that merging in captioners relies on, each with the check that it is there.

A rename there is one line here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

CACHE_NAMES = ("cache", "past_key_values")  # from transformers 5.24 on; before
_CALL = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "pixel_values")


def cache_in(values: Mapping[str, Any]) -> Any:
    """The cache among a call's arguments, or in a model's output; None where there is none."""
    return next((values[name] for name in CACHE_NAMES if values.get(name) is not None), None)


def check_captioner(model: Any, parts: Iterable[str]) -> None:
    """Raise RuntimeError where a captioner lacks a name that merging needs.

    Args:
        model: a captioner of transformers.
        parts: paths of modules and methods in it, as `model.vision_tower`.
    """
    takes = inspect.signature(type(model).forward).parameters
    missing = [f"forward({name}=)" for name in _CALL if name not in takes]
    if not any(name in takes for name in CACHE_NAMES):
        missing.append(f"forward({'= or '.join(CACHE_NAMES)}=)")
    for path in parts:
        found = model
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is None:
            missing.append(path)
    if missing:
        import transformers

        raise RuntimeError(
            f"expected {type(model).__name__} of transformers to have {', '.join(missing)}, found"
            f" none in version {transformers.__version__}; take another version, such as 5.24"
        )
