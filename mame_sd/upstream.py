"""Names of torch, diffusers and transformers that this package relies on beyond what these
document, each with one check.

`require` raises where a name is gone, so that nothing is silently left undone: `apply_mame` asks
for torch's and diffusers', `compress_cache` for transformers'. `mame-sd doctor` asks for all.
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

import torch

# The argument of a forward, and the field of an output, that holds the KV cache.
CACHE_NAMES = ("cache", "past_key_values")  # from 5.24 on; before
_IMPLEMENTATION = "_attn_implementation"  # attribute of a config: which attention function runs

# Compilers of torch before 2.13 can't follow merging.
COMPILES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)

_ASSISTED = "_assisted_decoding"  # method of GenerationMixin that runs assisted generation


def outside_old_graphs(call: Callable[..., Any]) -> Callable[..., Any]:
    """Keep `call` out of compiled graphs where torch is older than 2.13: it runs eagerly there."""
    return call if COMPILES else torch.compiler.disable(call)


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


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """The KV cache as a keyword argument of a model's forward or generate."""
    return {cache_argument(type(model).forward) or CACHE_NAMES[0]: cache}


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
    return getattr(importlib.import_module(module), name)


def _has(place: str, *names: str) -> Callable[[], bool]:
    return lambda: all(hasattr(_of(place), name) for name in names)


def _takes(place: str, *names: str) -> Callable[[], bool]:
    return lambda: set(names) <= inspect.signature(_of(place).forward).parameters.keys()


_DISPATCH = "diffusers.models.attention_dispatch"
_HOOKS = "diffusers.hooks:HookRegistry"
_LLAMA = "transformers.models.llama.modeling_llama"
_GEMMA = "transformers.models.gemma2.configuration_gemma2:Gemma2Config"


def _hooked() -> Any:
    """A module on which diffusers has put a registry of hooks, with one hook."""
    module = _of("torch.nn:Identity")()
    hook = _of("diffusers.hooks:ModelHook")()
    _of(_HOOKS).check_if_exists_or_initialize(module).register_hook(hook, "mame_check")
    return module


NAMES: dict[str, dict[str, Callable[[], bool]]] = {
    "torch": {
        "the stack of function modes": _has(
            "torch:_C", "_len_torch_function_stack", "_get_function_stack_at"
        ),
        "the graph task of a backward pass": _has("torch:_C", "_current_graph_task_id"),
        "scaled_dot_product_attention of torch._C._nn": _has(
            "torch._C:_nn", "scaled_dot_product_attention"
        ),
        "forward hooks of a module": lambda: all(
            hasattr(_of("torch.nn:Identity")(), name)
            for name in (
                "_forward_pre_hooks",
                "_forward_pre_hooks_with_kwargs",
                "_forward_hooks",
                "_forward_hooks_always_called",
            )
        ),
    },
    "diffusers": {
        "_backends of the attention dispatcher": lambda: isinstance(
            _of(f"{_DISPATCH}:_AttentionBackendRegistry")._backends, dict
        ),
        "hooks, _hook_order and _fn_refs of HookRegistry": lambda: all(
            len(getattr(_hooked()._diffusers_hook, name)) == 1
            for name in ("hooks", "_hook_order", "_fn_refs")
        ),
        "forward and original_forward of a hooked function": lambda: all(
            hasattr(_hooked()._diffusers_hook._fn_refs[0], name)
            for name in ("forward", "original_forward")
        ),
        "_parallel_config of a model": _has(
            "diffusers.models.modeling_utils:ModelMixin", "_parallel_config"
        ),
        "progress_bar of a pipeline": _has("diffusers:DiffusionPipeline", "progress_bar"),
    },
    "transformers": {
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
            "transformers.cache_utils:DynamicLayer",
            "update",
            "get_seq_length",
            "get_mask_sizes",
            "lazy_initialization",
        ),
        "layers of DynamicCache": lambda: hasattr(
            _of("transformers.cache_utils:DynamicCache")(), "layers"
        ),
        f"{_ASSISTED} of GenerationMixin": _has(
            "transformers.generation.utils:GenerationMixin", _ASSISTED
        ),
        f"{_IMPLEMENTATION} of a config": lambda: hasattr(
            _of("transformers.models.llama.configuration_llama:LlamaConfig")(), _IMPLEMENTATION
        ),
        "layer_types, sliding_window and attn_logit_softcapping of a config": lambda: all(
            hasattr(_of(_GEMMA)(), name)
            for name in ("layer_types", "sliding_window", "attn_logit_softcapping")
        ),
    },
}
RELEASES = {
    "torch": "between 2.7 and 2.15",
    "diffusers": "between 0.37 and 0.42",
    "transformers": "between 5.0 and 5.24",
}


@cache
def missing(library: str) -> tuple[str, ...]:
    """Which of `NAMES` the installed release of a library doesn't have."""
    return tuple(what for what, there in NAMES[library].items() if not _holds(there))


def _holds(there: Callable[[], bool]) -> bool:
    try:
        return there()
    except (ImportError, AttributeError, TypeError):
        return False


def complaint(library: str) -> str:
    """What the installed release of a library lacks, and what to do; empty where nothing."""
    gone = missing(library)
    if not gone:
        return ""
    return _complaint(library, "; ".join(gone))


def _complaint(library: str, gone: str) -> str:
    return (
        f"{library} {importlib.metadata.version(library)}: expected {gone}, found none; install a"
        f" release {RELEASES[library]}"
    )


def require(*libraries: str) -> None:
    """Raises RuntimeError where the installed release of a library lacks a name."""
    for library in libraries:
        if missing(library):
            raise RuntimeError(complaint(library))


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
            _complaint("transformers", f"{'; '.join(gone)} of {type(model).__name__}")
        )
