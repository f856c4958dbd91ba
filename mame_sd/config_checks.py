"""What MaMeConfig accepts: each field by itself, and fields beside one another.

Errors are ValueErrors that name the field.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

CHOICES: dict[str, tuple[str, ...]] = {
    "preset": ("default", "plain"),
    "partition": ("alternating", "sequential", "random", "grid", "random-grid"),
    "metric": ("cosine", "dot", "euclidean", "softmax"),
    "feature": ("x", "k", "k-mean"),
    "weights": ("average", "best", "pick"),
    "variant": ("settled", "paper"),
    "merge": ("qkv", "kv"),
}
TAU_RANGE: dict[str, tuple[float, float]] = {
    "cosine": (-1.0, 1.0),
    "dot": (-math.inf, math.inf),
    "euclidean": (-math.inf, 0.0),
    "softmax": (0.0, 1.0),
}
PARTS = ("mlp",)  # what can merge beside self-attention, each the share of tokens to keep there
SHARES = ("keep", "references", *PARTS)


def check_given(given: Mapping[str, Any]) -> None:
    """Types, names and ranges of single fields, before any default is filled in."""
    for name, choices in CHOICES.items():
        if name in given and given[name] not in choices:
            raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {given[name]!r}")
    for name in ("tau", "eps", *SHARES):
        if name in given and (not _is_number(given[name]) or math.isnan(given[name])):
            raise ValueError(f"{name}: expected a number, got {given[name]!r}")
    if "tau" in given and "keep" in given:
        raise ValueError(
            f"expected tau or keep, got both (tau={given['tau']!r}, keep={given['keep']!r});"
            " drop one"
        )
    for name in SHARES:
        if name in given and not 0 < given[name] <= 1:
            raise ValueError(f"{name}: expected a share above 0 and at most 1, got {given[name]!r}")
    if "eps" in given and not 0 < given["eps"] < math.inf:
        raise ValueError(f"eps: expected a finite number above 0, got {given['eps']!r}")
    for name, low in (("seed", 0), ("min_tokens", 1)):
        if name in given and not (_is_int(given[name]) and low <= given[name] < 2**63):
            raise ValueError(
                f"{name}: expected a whole number from {low} to 2^63 - 1, got {given[name]!r}"
            )
    if "tiles" in given and not (
        _is_int(given["tiles"]) and (given["tiles"] == 0 or given["tiles"] >= 2)
    ):
        raise ValueError(
            f"tiles: expected a side of at least 2 tokens, or 0 for none, got {given['tiles']!r}"
        )
    for name in ("refine", "redraw", "pairs", "correct", "detail"):
        if name in given and not isinstance(given[name], bool):
            raise ValueError(f"{name}: expected True or False, got {given[name]!r}")
    if "made_for" in given and not isinstance(given["made_for"], str):
        raise ValueError(
            f"made_for: expected what calibration wrote, or nothing, got {given['made_for']!r}"
        )
    for name in ("stride", "size"):
        pair = given.get(name, (2, 2))
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and all(_is_int(n) and n >= 1 for n in pair)
        ):
            raise ValueError(f"{name}: expected two whole numbers of at least 1, got {pair!r}")
    if given.get("stride") == (1, 1):
        raise ValueError(
            "stride: expected a cell of more than one token, got (1, 1), which leaves nothing to"
            " merge"
        )


def check_resolved(config: Any) -> None:
    """What fields demand of one another, once all are concrete: `config` is a MaMeConfig."""
    if config.tau is not None:
        low, high = TAU_RANGE[config.metric]
        if not low <= config.tau <= high or math.isinf(config.tau):
            raise ValueError(
                f"tau: expected a finite number from {low:g} to {high:g} for metric"
                f" {config.metric!r}, got {config.tau!r}; give a tau in that range, or keep instead"
            )
    if config.variant == "paper" and (
        config.tau is None or config.merge != "qkv" or config.weights != "average"
    ):
        raise ValueError(
            "variant: 'paper' knows only tau, merge='qkv' and weights='average' (the printed"
            f" equations), got tau={config.tau!r}, keep={config.keep!r}, merge={config.merge!r},"
            f" weights={config.weights!r}"
        )
    if config.weights == "pick" and config.merge != "kv":
        raise ValueError(
            "weights: 'pick' drops keys and values, from which nothing could be restored, and"
            f" needs merge='kv', got merge={config.merge!r}; leave merge out, or take weights"
            " 'best' or 'average'"
        )
    if config.references is not None and config.merge != "kv":
        raise ValueError(
            "references: keys and values of reference images merge alone, which needs merge='kv',"
            f" got merge={config.merge!r}; leave references out, or merge"
        )
    if config.detail and config.weights == "average":
        raise ValueError(
            "detail: needs weights by which each token goes to one group, got weights='average';"
            " leave detail out, or take weights='best'"
        )
    if config.variant == "paper" and any(getattr(config, name) is not None for name in PARTS):
        raise ValueError(
            "variant: 'paper' merges self-attention alone, got "
            f"mlp={config.mlp!r}; leave it out, or give variant='settled'"
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def plain(name: str, value: Any) -> Any:
    """`value` with NumPy's and other real numbers as Python's own; what is no number comes back as
    it is.
    """
    if isinstance(value, tuple):
        return tuple(plain(name, item) for item in value)
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral) and name not in ("tau", "eps", *SHARES):
        return int(value)
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(
                f"{name}: expected a number in the range of float, got a larger one"
            ) from None
    return value
