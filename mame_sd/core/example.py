"""A small run through all that our kernels do: what a device is asked before they run on it
(`mame_sd.core.fused`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig, Study
from mame_sd.core.correction import (
    Drawn,
    add_by_kernel,
    added_by_kernels,
    apart_from,
    first_order_of_means,
    joined,
)
from mame_sd.core.detail import Detail
from mame_sd.core.merge import plan_merge
from mame_sd.core.plan import RowPlan

TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the largest value
_PLANE, _WIDTH, _HEADS = (6, 18), 24, 2  # tiles are cut


def results(device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """What merging, restoring and correcting give of the same tokens each time, by kernels where
    `fused.on` says so.
    """
    generator = torch.Generator().manual_seed(0)
    length = _PLANE[0] * _PLANE[1]
    drawn = [torch.randn(2, length, _WIDTH, generator=generator) for _ in range(4)]
    # Groups of tokens that are far more alike than others: rounding decides nowhere who merges with
    # whom.
    feature = torch.nn.functional.one_hot(torch.arange(length) % 3 * 6, _WIDTH) * 8.0 + drawn[0] / 4
    x, query, key, value = (t.to(device, dtype) for t in (feature, *drawn[1:]))
    found: dict[str, Tensor] = {}
    settings = {
        "kv": MaMeConfig(keep=0.25),
        "qkv": MaMeConfig(keep=0.625, study=Study(stride=(2, 2), detail=True), merge="qkv"),
    }
    for name, config in settings.items():
        plan = plan_merge(x, config, _PLANE)
        assert isinstance(plan, RowPlan)
        merged = plan.merge(value)
        found[f"{name}, means"] = plan.restore(merged)  # PyTorch's may have another order
        if config.merge == "qkv":
            found[f"{name}, detail"] = plan.restore(merged, Detail(x, _PLANE))
        found[f"{name}, correction"] = _corrected(
            plan, query, key, value, proportional=name == "qkv"
        )
    return found


def _corrected(
    plan: RowPlan, query: Tensor, key: Tensor, value: Tensor, proportional: bool
) -> Tensor:
    """What is added to an output of ones, [B, H, L, D]."""
    query, key, value = (t.unflatten(2, (_HEADS, -1)).transpose(1, 2) for t in (query, key, value))
    kept_key, kept_value = (
        plan.merge(t.transpose(1, 2).flatten(2)).unflatten(2, (_HEADS, -1)).transpose(1, 2)
        for t in (key, value)
    )
    output, scale = torch.ones_like(query), query.shape[-1] ** -0.5
    drawn = Drawn(key, value, 0, apart=False)
    lacks = added_by_kernels(
        plan, (kept_key, kept_value), 0, drawn, plan.sizes, scale, proportional
    )
    if lacks is not None:
        return add_by_kernel(output, query, lacks)
    sample = plan.positions.sample
    rows = plan.rows.index_select(1, sample).unsqueeze(1)
    means, drawn_too = (
        joined(kept_key, kept_value),
        joined(key.index_select(2, sample), value.index_select(2, sample)),
    )
    given = None if proportional else means, plan.sizes.unsqueeze(1), plan.tokens_in
    covariance, shift = first_order_of_means(
        apart_from(means, drawn_too, rows), key.shape[-1], *given
    )
    added = query @ (scale * covariance).transpose(-1, -2).to(query.dtype)
    return output + added if shift is None else output + added + shift
