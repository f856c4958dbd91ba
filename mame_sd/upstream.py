"""Names of torch, diffusers and transformers that this package relies on beyond what these
document, each with one check.

`require` raises where a name is gone, so that nothing is silently left undone: `apply_mame` asks
for torch's and diffusers', `compress_cache` for transformers'. `mame-sd doctor` asks for all.
`private` gives those that are needed at import.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import cache
from inspect import Parameter, signature
from pkgutil import resolve_name
from types import SimpleNamespace
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


def parameters_of(kind: type) -> dict[str, Parameter]:
    """Return the parameters of a class's `forward` by name, without self.

    A forward that passes on `*args` (a derived class's, or a tool's that wraps it) takes those of
    the function that it wraps, or of the nearest base whose forward names them all.
    """
    own: dict[str, Parameter] | None = None
    for base in kind.__mro__:
        forward = vars(base).get("forward")
        if forward is None or base is torch.nn.Module:
            continue
        found = dict(signature(forward).parameters)
        if (first := next(iter(found), None)) and found[first].kind is not Parameter.VAR_POSITIONAL:
            del found[first]  # self
        if not any(one.kind is Parameter.VAR_POSITIONAL for one in found.values()):
            return found
        own = found if own is None else own
    return own or {}


def names_arguments(kind: type) -> bool:
    """Whether it can be told which arguments a class's `forward` takes by position."""
    return all(one.kind is not one.VAR_POSITIONAL for one in parameters_of(kind).values())


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The name by which `forward` takes the KV cache; None where it takes none."""
    parameters = signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """The KV cache as a keyword argument of a model's forward or generate."""
    found = next((name for name in CACHE_NAMES if name in parameters_of(type(model))), None)
    return {found or CACHE_NAMES[0]: cache}


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


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether torch.compile runs this module's calls, whose graphs may leave later hooks out."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module, "_orig_mod")
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def _hooked() -> Any:
    """The registry of hooks that diffusers has put on a module, with one hook."""
    registry = resolve_name("diffusers.hooks:HookRegistry")
    registry = registry.check_if_exists_or_initialize(torch.nn.Identity())
    registry.register_hook(resolve_name("diffusers.hooks:ModelHook")(), "mame_check")
    return registry


def _arguments(place: str) -> Any:
    """An object that has the names of the arguments of a class's forward."""
    return SimpleNamespace(**signature(resolve_name(place).forward).parameters)


_LLAMA = "transformers.models.llama.modeling_llama"
# Of each library the names, by where they stand; of names with a bar between them one will do.
NAMES: dict[str, dict[str, str]] = {
    "torch": {
        "torch": "_fused_sdp_choice",
        "torch.utils._python_dispatch": "_disable_current_modes",
        "torch._C": "_len_torch_function_stack _get_function_stack_at _current_graph_task_id",
        "torch._C:_nn": "scaled_dot_product_attention",
        "a module": "_forward_pre_hooks _forward_pre_hooks_with_kwargs _forward_hooks"
        " _forward_hooks_always_called",
    },
    "diffusers": {
        "diffusers.models.attention_dispatch:_AttentionBackendRegistry": "_backends",
        "diffusers.models.modeling_utils:ModelMixin": "_parallel_config",
        "diffusers:DiffusionPipeline": "progress_bar",
        "HookRegistry": "hooks _fn_refs",
        "a hooked function": "forward original_forward",
    },
    "transformers": {
        "an attention's forward": f"{'|'.join(CACHE_NAMES)} hidden_states position_embeddings"
        " attention_mask",
        "a rotary embedding's forward": "x position_ids",
        "a KV cache": "layers",
        "a config": f"{_IMPLEMENTATION} layer_types sliding_window attn_logit_softcapping",
        _LLAMA: "apply_rotary_pos_emb",
        "transformers.cache_utils:DynamicLayer": "update get_seq_length get_mask_sizes"
        " lazy_initialization",
        "transformers.generation.utils:GenerationMixin": _ASSISTED,
    },
}
_MADE: dict[str, Callable[[], Any]] = {  # what stands under no name
    "a module": torch.nn.Identity,
    "HookRegistry": _hooked,
    "a hooked function": lambda: _hooked()._fn_refs[0],
    "an attention's forward": lambda: _arguments(f"{_LLAMA}:LlamaAttention"),
    "a rotary embedding's forward": lambda: _arguments(f"{_LLAMA}:LlamaRotaryEmbedding"),
    "a KV cache": lambda: resolve_name("transformers.cache_utils:DynamicCache")(),
    "a config": lambda: resolve_name("transformers:Gemma2Config")(),
}
RELEASES = {
    "torch": "between 2.7 and 2.15",
    "diffusers": "between 0.37 and 0.42",
    "transformers": "between 5.0 and 5.24",
}


@cache
def missing(library: str) -> tuple[str, ...]:
    """Which of `NAMES` the installed release of a library doesn't have."""
    found = []
    for place, names in NAMES[library].items():
        try:
            thing = _MADE[place]() if place in _MADE else resolve_name(place)
        except (ImportError, AttributeError, TypeError):
            thing = None
        found += [
            f"{name.replace('|', ' or ')} of {place}"
            for name in names.split()
            if not any(hasattr(thing, one) for one in name.split("|"))
        ]
    return tuple(found)


def complaint(library: str) -> str:
    """What the installed release of a library lacks, and what to do; empty where nothing."""
    gone = missing(library)
    return _complaint(library, "; ".join(gone)) if gone else ""


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


def private(library: str, place: str, name: str) -> Any:
    """Return a name of `NAMES` that is needed while our modules are imported.

    Raises:
        RuntimeError: the installed release of the library lacks it, or others of `NAMES`.
    """
    try:
        return getattr(resolve_name(place), name)
    except (ImportError, AttributeError):
        raise RuntimeError(complaint(library)) from None


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
    takes = parameters_of(type(model))
    gone = [f"{name} of its forward" for name in _CAPTIONER if name not in takes]
    if takes.keys().isdisjoint(CACHE_NAMES):
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
