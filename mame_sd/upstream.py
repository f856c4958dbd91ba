"""Names of transformers that this package relies on, each in one place with one check.

A release that renames one of them is one line to mend here. `require` raises where a name is gone,
so that nothing is silently left undone.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

# The argument of a forward, and the field of an output, that holds the KV cache.
CACHE_NAMES = ("cache", "past_key_values")  # from 5.24 on; before
_IMPLEMENTATION = "_attn_implementation"  # attribute of a config: which attention function runs

_ASSISTED = "_assisted_decoding"  # method of GenerationMixin that runs assisted generation


def cache_in(call: Mapping[str, Any]) -> Any:
    """The KV cache among the keyword arguments of a forward; None where there is none."""
    return next((call[name] for name in CACHE_NAMES if call.get(name) is not None), None)


def cache_of(output: Any) -> Any:
    """The KV cache of a forward's or a generate's output; None where there is none."""
    found = (getattr(output, name, None) for name in CACHE_NAMES)
    return next((value for value in found if value is not None), None)


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The name by which `forward` takes the KV cache; None where it takes none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def implementation_of(config: Any) -> str | None:
    """The name of the attention function that a model of this config calls."""
    return getattr(config, _IMPLEMENTATION, None)


def assisted() -> bool:
    """Whether the caller runs inside assisted generation, which crops caches."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == _ASSISTED:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _of(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"transformers.{module}"), name)


def _has(place: str, *names: str) -> Callable[[], bool]:
    return lambda: all(hasattr(_of(place), name) for name in names)


def _takes(place: str, *names: str) -> Callable[[], bool]:
    return lambda: set(names) <= inspect.signature(_of(place).forward).parameters.keys()


_LLAMA = "models.llama.modeling_llama"
_GEMMA = "models.gemma2.configuration_gemma2:Gemma2Config"
NAMES: dict[str, Callable[[], bool]] = {
    f"{' or '.join(CACHE_NAMES)} of an attention's forward": lambda: (
        cache_argument(_of(f"{_LLAMA}:LlamaAttention").forward) is not None
    ),
    "hidden_states, position_embeddings and attention_mask of an attention's forward": _takes(
        f"{_LLAMA}:LlamaAttention", "hidden_states", "position_embeddings", "attention_mask"
    ),
    "x and position_ids of a rotary embedding's forward": _takes(
        f"{_LLAMA}:LlamaRotaryEmbedding", "x", "position_ids"
    ),
    "apply_rotary_pos_emb beside an attention": lambda: callable(
        _of(f"{_LLAMA}:apply_rotary_pos_emb")
    ),
    "update, get_seq_length, get_mask_sizes and lazy_initialization of DynamicLayer": _has(
        "cache_utils:DynamicLayer",
        "update",
        "get_seq_length",
        "get_mask_sizes",
        "lazy_initialization",
    ),
    "layers of DynamicCache": lambda: hasattr(_of("cache_utils:DynamicCache")(), "layers"),
    f"{_ASSISTED} of GenerationMixin": _has("generation.utils:GenerationMixin", _ASSISTED),
    f"{_IMPLEMENTATION} of a config": lambda: hasattr(
        _of("models.llama.configuration_llama:LlamaConfig")(), _IMPLEMENTATION
    ),
    "layer_types, sliding_window and attn_logit_softcapping of a config": lambda: all(
        hasattr(_of(_GEMMA)(), name)
        for name in ("layer_types", "sliding_window", "attn_logit_softcapping")
    ),
}


@cache
def missing() -> tuple[str, ...]:
    """Which of `NAMES` the installed transformers doesn't have."""
    return tuple(what for what, there in NAMES.items() if not _holds(there))


def _holds(there: Callable[[], bool]) -> bool:
    try:
        return there()
    except (ImportError, AttributeError):
        return False


def require() -> None:
    """Raises RuntimeError where the installed transformers lacks a name."""
    if missing():
        raise RuntimeError(
            f"transformers {importlib.metadata.version('transformers')}: expected"
            f" {'; '.join(missing())}, found none; install a release between 5.0 and 5.24"
        )


# Captioners: LLaVA and Qwen-VL.


@cache
def hidden_states_are_apart() -> bool:
    """Whether threads may ask one model for hidden states at once. transformers 5.0 replaces the
    forwards of its blocks for each call that does.
    """
    return importlib.util.find_spec("transformers.utils.output_capturing") is not None


_CAPTIONER = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "pixel_values")


def require_captioner(model: Any, parts: tuple[str, ...]) -> None:
    """Raises RuntimeError where a captioner of transformers lacks a name.

    Args:
        model: the captioner.
        parts: paths of modules and methods in it, as `model.vision_tower`.
    """
    takes = inspect.signature(type(model).forward).parameters
    gone = [f"{name} of its forward" for name in _CAPTIONER if name not in takes]
    if cache_argument(type(model).forward) is None:
        gone.append(f"{' or '.join(CACHE_NAMES)} of its forward")
    for path in parts:
        found = model
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is None:
            gone.append(path)
    if gone:
        raise RuntimeError(
            f"transformers {importlib.metadata.version('transformers')}: expected"
            f" {'; '.join(gone)} of {type(model).__name__}, found none; install a release between"
            " 5.0 and 5.24"
        )
