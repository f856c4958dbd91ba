"""What attention loses with fewer keys, given back to first order in the logits.

Expanded around equal weights, attention over N keys is o(q) = mean(v) + scale * Cov(v, k) q + ...,
mean and covariance taken over the keys. Fewer keys have another mean and covariance: means of
groups lack what varies within the groups, picked ones are off by chance. Both are linear in q, and
the difference costs two products of [D, N] by [N, D], as little as D more keys would: a control
variate (linear attention of what is missing), exact to first order whatever stands for the dropped
keys.

Where the dropped tokens have no keys and values yet, a few of them tell nearly as much: of groups
that stand as their means everything is known but how tokens vary within them, and that is estimated
from a random sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mame_sd.core import fused
from mame_sd.core.plan import Plan, RowPlan, no_autocast


class Moments(NamedTuple):
    """Of keys and values: the means [..., 1, D], and Cov(v, k) [..., D, D] in at least fp32."""

    key: Tensor
    value: Tensor
    covariance: Tensor


def moments(key: Tensor, value: Tensor, sizes: Tensor | None = None) -> Moments:
    """The moments of keys and values [..., N, D], each counted `sizes` times ([..., N], broadcast);
    None: all alike.
    """
    if sizes is None:
        share: Tensor | float = 1 / key.shape[-2]
        middle_key, middle_value = key.mean(-2, keepdim=True), value.mean(-2, keepdim=True)
    else:
        exact = sizes.to(torch.promote_types(key.dtype, torch.float32))
        share = (exact / exact.sum(-1, keepdim=True)).unsqueeze(-1)
        middle_key, middle_value = (
            (share * t).sum(-2, keepdim=True).to(t.dtype) for t in (key, value)
        )
    return Moments(middle_key, middle_value, _outer(key - middle_key, value - middle_value, share))


def within_groups(
    kept_key: Tensor, kept_value: Tensor, key: Tensor, value: Tensor, rows: Tensor
) -> Tensor:
    """Cov(v, k) [..., D, D] within groups of tokens that are kept as their means, estimated from a
    sample, in at least fp32.

    With the covariance between the means, each counted as often as it stands for tokens, it is that
    of all tokens. What the sample shows is shrunk by how little its two halves agree, <A, B> / |(A
    + B) / 2|^2 of each head: by nothing where much varies alike, to nothing where the estimate is
    noise.

    Args:
        kept_key, kept_value: the means' [..., N', D].
        key, value: those of tokens drawn at random from all, [..., n, D].
        rows: which of the means each drawn token went to, [..., n] (broadcast).
    """
    rows = rows.unsqueeze(-1)  # values may be of another width than keys
    key, value = (
        t - means.gather(-2, rows.expand(t.shape))
        for t, means in ((key, kept_key), (value, kept_value))
    )
    half = max(1, key.shape[-2] // 2)
    a, b = (_outer(key[..., first::2, :], value[..., first::2, :], 1 / half) for first in (0, 1))
    within = (a + b) / 2
    signal, power = ((x * y).sum((-2, -1), keepdim=True) for x, y in ((a, b), (within, within)))
    return within * (signal / power.clamp(min=torch.finfo(power.dtype).tiny)).clamp(0, 1)


class Lacking(NamedTuple):
    """What attention over the kept keys lacks: scale * `covariance` q + `shift` is to be added.

    Weights of attention sum to 1, so `shift` may be added to the kept values instead; None:
    nothing.
    """

    covariance: Tensor  # [..., D, D] of Cov(v, k)
    shift: Tensor | None  # [..., 1, D]


def first_order(every: Moments, kept: Moments) -> Lacking:
    """What keys lack whose moments are `kept`, each counted as its logit counts it, where those of
    all are `every`.
    """
    return Lacking(every.covariance - kept.covariance, every.value - kept.value)


def first_order_of_means(
    kept: tuple[Tensor, Tensor],
    drawn: tuple[Tensor, Tensor],
    rows: Tensor,
    sizes: Tensor,
    weighed: bool,
) -> Lacking:
    """What the means of groups lack, from a sample of the tokens (`within_groups`).

    Args:
        kept: the means' keys and values [..., N', D].
        drawn: the sample's [..., n, D].
        rows: which of the means each drawn token went to, [..., n] (broadcast).
        sizes: how many tokens each of the means stands for, [..., N'] (broadcast).
        weighed: the logits count each key as often as that. Then nothing is lacking but what varies
            within groups.
    """
    within = within_groups(*kept, *drawn, rows)
    if weighed:
        return Lacking(within, None)
    # The difference of two means in one product: each rounded by itself would leave little of it in
    # half precision.
    apart = sizes / sizes.sum(-1, keepdim=True) - 1 / sizes.shape[-1]
    with no_autocast(kept[1]):
        shift = apart.to(kept[1].dtype).unsqueeze(-2) @ kept[1]
    return Lacking(moments(*kept, sizes).covariance + within - moments(*kept).covariance, shift)


def _outer(key: Tensor, value: Tensor, share: Tensor | float) -> Tensor:
    """sum_i share_i value_i key_i^T [..., D, D]."""
    root, exact = share**0.5, torch.promote_types(key.dtype, torch.float32)
    dtype = exact if key.dtype == torch.float16 else key.dtype  # whose range a covariance may leave
    key, value = ((root * t).to(dtype) for t in (key, value))
    with no_autocast(key):  # whose fp16 a covariance may leave too
        return (value.transpose(-1, -2) @ key).to(exact)


class Added(NamedTuple):
    """What attention lacks as kernels make it, both in fp32: `product` [B * H, D, D'], by which
    queries are multiplied, and `shift` [B * H, D'] (or none, [0, D']), to be added to its output.
    """

    product: Tensor
    shift: Tensor


class Drawn(NamedTuple):
    """A sample of the tokens of which a plan made groups, for `added_by_kernels`.

    Attributes:
        key, value: [B, H, N, D] and [B, H, N, D'].
        first: where the planned tokens begin in them.
        apart: the sampled ones alone begin there, one after the other.
        size: (times, height, width) of a video's tokens, which don't lie as they were planned.
    """

    key: Tensor
    value: Tensor
    first: int
    apart: bool
    size: tuple[int, ...] = ()


def added_by_kernels(
    plan: Plan,
    kept: tuple[Tensor, Tensor],
    first: int,
    drawn: Drawn,
    sizes: Tensor,
    scale: float,
    weighed: bool,
) -> Added | None:
    """`first_order_of_means` times the logits' scale by kernels; None where PyTorch's operations
    have to do it.

    Args:
        plan: of the tokens, without special ones.
        kept: keys and values [B, H, n, D] and [B, H, n, D'], among which the means begin at
            `first`.
        drawn: the sample.
        sizes: how many tokens each of the keys stands for, [B, n] fp32.
        scale: of the logits, and of the covariance.
        weighed: see `first_order_of_means`.
    """
    if (
        kept[0].dim() != 4
        or plan.special
        or not isinstance(plan, RowPlan)
        or not plan.by_kernels
        or not fused.on(*kept, drawn.key, drawn.value)
    ):
        return None
    from mame_sd.core import triton_moments as kernels
    from mame_sd.core.triton_common import table_of

    pos = plan.positions
    size = drawn.size if len(drawn.size) == 3 else (1, 1, pos.L)
    found = fused.launched(
        kernels.partial_moments,
        *kept,
        drawn.key,
        drawn.value,
        plan.rows,
        sizes,
        *table_of(pos),
        size,
        pos.samples,
        [first, drawn.first, int(drawn.apart)],
        plan.tokens_kept,
        weighed,
    )
    lacks = (
        None
        if found is None
        else fused.launched(kernels.lacking, *found, plan.tokens_kept, pos.samples, scale, weighed)
    )
    return None if lacks is None else Added(*lacks)


def add_by_kernel(output: Tensor, query: Tensor, lacks: Added, in_place: bool = True) -> Tensor:
    """Attention's output [B, H, Q, D'] with query @ product + shift added, in its place unless
    others may read it.
    """
    output = output if in_place else output.clone()
    if fused.on(output, query) and output.stride(-1) == 1:
        from mame_sd.core import triton_moments as kernels

        if fused.launched(kernels.add_lacking, output, query, *lacks) is not None:
            return output
    product = lacks.product.view(*query.shape[:2], *lacks.product.shape[1:])
    with no_autocast(query):
        added = query.to(product.dtype) @ product
        if lacks.shift.shape[0]:
            added = added + lacks.shift.view(*query.shape[:2], 1, -1)
    return (output + added).to(output.dtype)
