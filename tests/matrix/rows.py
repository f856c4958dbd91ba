"""What a row of the compatibility matrix is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import diffusers
import pytest
from packaging.version import Version
from torch import Tensor

Processor = Literal["", "same", "replaced", "reset", "error"]


def nothing(subject: Any) -> None:
    """Switch nothing on, for rows whose feature is the pipeline itself."""


def param(value: Any, since: str) -> Any:
    """Return a parameter of a test, skipped with an older diffusers."""
    old = Version(diffusers.__version__) < Version(since)
    mark = pytest.mark.skipif(old, reason=f"needs diffusers {since}")
    return pytest.param(value, id=value.name, marks=mark)


@dataclass(frozen=True)
class Row:
    """One pipeline, or one feature on a pipeline, and what merging is to do there.

    Attributes:
        name: as in the table.
        build: a pipeline or model that was never touched, the same each time.
        run: one call of it, seeded; the images or the model's output.
        merges: how many layers merge, by their number of tokens.
        switch: turns the feature on; must work before `apply_mame` and after it, with the same
            result.
        undo: turns it off again; merging must go on as if it had never been on.
        target: what `apply_mame` is given, when that is not the pipeline or model itself.
        loads: checks that `from_pretrained` gives back what `save_pretrained` was given while it
            merged; six rows do.
        exact: output after a switch in either order, and after undoing it, is bit-equal; else equal
            to rounding.
        modes: settings to merge by; each keeps half of the tokens.
        processor: what becomes of `set_attn_processor(MaMeAttnProcessor(...))`: "" is not checked;
            "same" as `apply_mame`; "replaced" by the feature, silently; "reset" to default settings
            by it; "error" that tells to use `apply_mame`.
        one_liner: the table's words if `processor` is "".
        since: the first version of diffusers in which this works here without our code.
    """

    name: str
    build: Callable[[], Any]
    run: Callable[[Any], Tensor]
    merges: Mapping[int, int]
    switch: Callable[[Any], Any] = nothing
    undo: Callable[[Any], Any] | None = None
    target: Callable[[Any], Any] = lambda subject: subject
    loads: bool = False
    exact: bool = True
    modes: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {"keep": {"keep": 0.5}, "tau": {"tau": -1.0}}
    )
    min_tokens: int = 60
    processor: Processor = ""
    one_liner: str = ""
    since: str = "0"
