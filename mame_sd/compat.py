"""List undocumented names of torch, diffusers and transformers that this package needs.

`require` raises an error if a name is missing, so that nothing silently fails to merge:
`apply_mame` checks torch and diffusers, `compress_cache` checks transformers, and `mame-sd doctor`
checks all. `private` returns names of torch that are needed at import.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from inspect import Parameter, signature
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch

# Names of the KV cache among the arguments of a forward and the fields of an output.
CACHE_NAMES = ("cache", "past_key_values")  # from 5.24 on; before 5.24
IMPLEMENTATION = "_attn_implementation"  # attribute of a config: name of its attention

# torch.compile can trace merging from torch 2.13 on.
COMPILES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def outside_old_graphs(call: Callable[..., Any]) -> Callable[..., Any]:
    """Keep `call` out of compiled graphs if torch is older than 2.13. It runs eagerly there."""
    return call if COMPILES else torch.compiler.disable(call)


def cache_in(call: Mapping[str, Any]) -> Any:
    """Return the KV cache among the keyword arguments of a forward, or None."""
    return next((call[name] for name in CACHE_NAMES if call.get(name) is not None), None)


def cache_of(output: Any) -> Any:
    """Return the KV cache of the output of a forward or of generate, or None."""
    caches = (getattr(output, name, None) for name in CACHE_NAMES)
    return next((value for value in caches if value is not None), None)


def parameters_of(kind: type) -> dict[str, Parameter]:
    """Return the parameters of a class's `forward` by name, without self.

    A forward with `*args` (of a derived class, or of a tool's wrapper) gets the parameters of the
    function that it wraps, or of the nearest base whose forward names all parameters.
    """
    nearest: dict[str, Parameter] | None = None
    for base in kind.__mro__:
        forward = vars(base).get("forward")
        if forward is None or base is torch.nn.Module:
            continue
        parameters = dict(signature(forward).parameters)
        if (first := next(iter(parameters), None)) and parameters[
            first
        ].kind is not Parameter.VAR_POSITIONAL:
            del parameters[first]  # self
        if not any(one.kind is Parameter.VAR_POSITIONAL for one in parameters.values()):
            return parameters
        nearest = parameters if nearest is None else nearest
    return nearest or {}


def names_arguments(kind: type) -> bool:
    """Return True if the positional arguments of a class's `forward` have known names."""
    return all(one.kind is not one.VAR_POSITIONAL for one in parameters_of(kind).values())


def with_cache(module: Any, cache: Any) -> dict[str, Any]:
    """Return the KV cache as a keyword argument of a module's forward or a model's generate."""
    names = parameters_of(type(module))
    return {next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[0]): cache}


def is_compiled(module: torch.nn.Module) -> bool:
    """Return True if torch.compile runs this module's calls. Graphs may omit later hooks."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module, "_orig_mod")
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def _hooked() -> Any:
    """Return a registry of diffusers' hooks on a module, with one hook."""
    registry = resolve_name("diffusers.hooks:HookRegistry")
    registry = registry.check_if_exists_or_initialize(torch.nn.Identity())
    registry.register_hook(resolve_name("diffusers.hooks:ModelHook")(), "mame_check")
    return registry


def _arguments(place: str) -> Any:
    """Return an object whose attributes are the arguments of a class's forward."""
    return SimpleNamespace(**signature(resolve_name(place).forward).parameters)


_LLAMA = "transformers.models.llama.modeling_llama"
# Names of each library, by the objects that have them. Of names joined by a bar, one suffices.
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
        "a config": f"{IMPLEMENTATION} layer_types sliding_window attn_logit_softcapping",
        _LLAMA: "apply_rotary_pos_emb",
        "transformers.cache_utils:DynamicLayer": "update get_seq_length get_mask_sizes"
        " lazy_initialization",
    },
}
_MADE: dict[str, Callable[[], Any]] = {  # objects that can't be imported by name
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
    """Return those of `NAMES` that the installed release of a library does not have."""
    absent = []
    for place, names in NAMES[library].items():
        try:
            thing = _MADE[place]() if place in _MADE else resolve_name(place)
        except (ImportError, AttributeError, TypeError):
            thing = None
        absent += [
            f"{name.replace('|', ' or ')} of {place}"
            for name in names.split()
            if not any(hasattr(thing, one) for one in name.split("|"))
        ]
    return tuple(absent)


def complaint(library: str) -> str:
    """Return what the installed release of a library lacks and what to do, or an empty text."""
    gone = missing(library)
    return _complaint(library, "; ".join(gone)) if gone else ""


def _complaint(library: str, gone: str) -> str:
    return (
        f"{library} {importlib.metadata.version(library)}: expected {gone}, found none; install a"
        f" release {RELEASES[library]}"
    )


def require(*libraries: str) -> None:
    """Raise RuntimeError if the installed release of a library lacks a name."""
    for library in libraries:
        if missing(library):
            raise RuntimeError(complaint(library))


def private(place: str, name: str) -> Any:
    """Return the undocumented `name` of an object of torch, which is needed at import.

    Raises:
        RuntimeError: the installed torch lacks it.
    """
    try:
        return getattr(resolve_name(place), name)
    except (ImportError, AttributeError):
        raise RuntimeError(complaint("torch")) from None


# Captioners: LLaVA and Qwen-VL.


@cache
def hidden_states_are_apart() -> bool:
    """Return True if several threads may ask one model for hidden states at once.

    transformers 5.0 replaces the forwards of its blocks for each call that asks for them.
    """
    return importlib.util.find_spec("transformers.utils.output_capturing") is not None


_CAPTIONER = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "pixel_values")


def require_captioner(model: Any, parts: tuple[str, ...]) -> None:
    """Raise RuntimeError if a captioner of transformers lacks a name.

    `parts` are paths of modules and methods in it, such as `model.vision_tower`.
    """
    takes = parameters_of(type(model))
    gone = [f"{name} of its forward" for name in _CAPTIONER if name not in takes]
    if takes.keys().isdisjoint(CACHE_NAMES):
        gone.append(f"{' or '.join(CACHE_NAMES)} of its forward")
    for path in parts:
        part = model
        for name in path.split("."):
            part = getattr(part, name, None)
        if part is None:
            gone.append(path)
    if gone:
        raise RuntimeError(
            _complaint("transformers", f"{'; '.join(gone)} of {type(model).__name__}")
        )
