"""Pass options to attention for which the engine passes none (ERNIE-Image).

That model calls `optimized_attention` without the options that contain an override. Here the
engine's own forward runs with a replacement for that one function, which adds the options of the
current call. The forward is applied as an object patch, so the model itself is left as it is.
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
def attention_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Pass these options to attention of `forward_with_options` within the `with` block."""
    token = _OPTIONS.set(options)
    try:
        yield
    finally:
        _OPTIONS.reset(token)


def current_options() -> Mapping[str, Any]:
    """Return the options of the current call, empty outside of `attention_options`."""
    return _OPTIONS.get() or {}


def forward_with_options(attention: Any) -> Callable[..., Any]:
    """Return the forward of an attention module, which passes on the options of a call."""
    original = type(attention).forward
    engine_attention = original.__globals__[NAME]

    def optimized_attention(*args: Any, **kwargs: Any) -> Any:
        options = current_options()
        return engine_attention(
            *args, **kwargs, **({"transformer_options": options} if options else {})
        )

    names = {**original.__globals__, NAME: optimized_attention}
    forward = FunctionType(
        original.__code__, names, original.__name__, original.__defaults__, original.__closure__
    )
    forward.__kwdefaults__ = original.__kwdefaults__
    bound: Callable[..., Any] = forward.__get__(attention)
    return bound
