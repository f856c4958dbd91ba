"""Attention that the engine hands to no node (ERNIE-Image): it calls `optimized_attention` without
the options that hold an override.

The engine's own forward runs, with a stand-in for that one function, which adds the options of the
call under way. It goes in as an object patch, so the model itself is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any

NAME = "optimized_attention"
_OPTIONS: ContextVar[Mapping[str, Any] | None] = ContextVar("mame_sd_options", default=None)


@contextmanager
def handing_on(options: Mapping[str, Any]) -> Iterator[None]:
    """Within the block attention that was `handed` gets these options."""
    token = _OPTIONS.set(options)
    try:
        yield
    finally:
        _OPTIONS.reset(token)


def handed(attention: Any) -> Callable[..., Any]:
    """The forward of an attention module, which hands on the options of a call."""
    own = type(attention).forward
    engines = own.__globals__[NAME]

    def optimized_attention(*args: Any, **kwargs: Any) -> Any:
        options = _OPTIONS.get()
        return engines(
            *args, **kwargs, **({} if options is None else {"transformer_options": options})
        )

    names = {**own.__globals__, NAME: optimized_attention}
    forward = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    bound: Callable[..., Any] = forward.__get__(attention)
    return bound
