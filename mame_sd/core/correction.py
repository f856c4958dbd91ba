"""What attention loses with fewer keys, given back to first order in the logits.

Attention over N keys is expanded around equal weights: o(q) = mean(v) + scale * Cov(v, k) q + ...
Mean and covariance are taken over the keys. Fewer keys have another mean and covariance: means of
groups lack what varies within the groups, picked ones are off by chance. Both are linear in q. The
difference costs two products of [D, N] by [N, D], as little as D more keys would. It is a control
variate (linear attention of what is missing), exact to first order whatever stands for the dropped
keys.

Where the dropped tokens have no keys and values yet, a few of them tell nearly as much. Of groups
that stand as their means everything is known but how tokens vary within them. That is estimated
from a random sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.core import fused
from mame_sd.core.partition import constant
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


def joined(key: Tensor, value: Tensor) -> Tensor:
    """Keys [..., n, D] and values [..., n, D'] side by side, [..., n, D + D'] in at least fp32."""
    exact = torch.promote_types(key.dtype, torch.float32)
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        return torch.cat([key, value], -1, out=key.new_empty(0, dtype=exact))
    return torch.cat([key, value], -1).to(exact)


def within_groups(means: Tensor, drawn: Tensor, rows: Tensor, width: int) -> Tensor:
    """Cov(v, k) [..., D', D] within groups of tokens that are kept as their means, estimated from a
    sample, in at least fp32.

    With the covariance between the means, each counted as often as it stands for tokens, it is that
    of all tokens. What the sample shows is shrunk by how little its two halves agree: <A, B> / |(A
    + B) / 2|^2 of each head. It shrinks by nothing where much varies alike, to nothing where the
    estimate is noise.

    Args:
        means: the means' keys and values, `joined`, [..., N', D + D'].
        drawn: those of tokens drawn at random from all, [..., n, D + D'].
        rows: which of the means each drawn token went to, [..., n] (broadcast).
        width: D.
    """
    with no_autocast(means):
        return _within(apart_from(means, drawn, rows), width)


def apart_from(means: Tensor, drawn: Tensor, rows: Tensor) -> Tensor:
    """What drawn tokens [..., n, W] are apart from those of the means [..., N', W] to which they
    went, [..., n] (broadcast).
    """
    return drawn - means.gather(-2, rows.unsqueeze(-1).expand(drawn.shape))


def _within(apart: Tensor, width: int, between: Tensor | None = None) -> Tensor:
    """`within_groups` of a sample that is `apart` [..., n, D + D'] from its means; and `between`
    [..., D', D] added.
    """
    pairs = max(1, apart.shape[-2] // 2)
    if apart.shape[-2] % 2:
        apart = F.pad(apart, (0, 0, 0, 1))
    halves = apart.unflatten(-2, (2, -1))
    found = halves[..., width:].transpose(-1, -2) @ halves[..., :width]  # [..., 2, D', D]
    flat = found.view(-1, 2, found.shape[-2] * found.shape[-1])
    # <A, A>, <A, B> and <B, B>, and a little more: no head is divided by 0.
    products = torch.baddbmm(constant(_least, flat.dtype, flat.device), flat, flat.transpose(1, 2))
    share = (products[:, 0, 1] / products.sum((1, 2))).clamp(0, 0.25)  # of |A + B|^2
    added = torch.baddbmm(
        flat[:, :1] if between is None else between.view(flat.shape[0], 1, -1),
        share.view(-1, 1, 1).expand(-1, 1, 2),
        flat,
        beta=0 if between is None else 1,
        alpha=2 / pairs,
    )
    return added.view(*found.shape[:-3], *found.shape[-2:])


def _least(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(2, dtype=dtype, device=device).unsqueeze(0) * torch.finfo(dtype).tiny


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
    apart: Tensor, width: int, means: Tensor | None, sizes: Tensor, tokens: int
) -> Lacking:
    """What the means of groups lack, from a sample of the tokens (`within_groups`).

    Args:
        apart: what the sample is apart from the means (`apart_from`), [..., n, D + D'].
        width: D.
        means: keys and values of the means, `joined`, [..., N', D + D']. None: the logits count
            each of them as often as it stands for tokens. Then nothing is lacking but what varies
            within groups.
        sizes: how many tokens each of the means stands for, [..., N'] (broadcast).
        tokens: how many these are in all.
    """
    if means is None:
        with no_autocast(apart):
            return Lacking(_within(apart, width), None)
    heads = means.shape[-3:-2] if means.dim() > 3 else ()
    alike, counted = constant(_shares, means.shape[-2], tokens, means.dtype, means.device).unbind()
    with no_autocast(means):
        # Of each of the means its share, the share it should have less that, and the latter.
        shares = torch.addcmul(alike.expand(*heads, 3, 1), counted, sizes.unsqueeze(-2))
        sums = shares @ means  # [..., 3, D + D']
        lacks = (shares[..., 1:2, :].transpose(-1, -2) * means[..., width:]).transpose(-1, -2)
        # Cov_sizes - Cov_alike: the difference of sums, less that of the means' products.
        between = torch.baddbmm(
            (lacks @ means[..., :width]).flatten(0, -3),
            sums[..., :2, width:].transpose(-1, -2).flatten(0, -3),
            sums[..., 1:, :width].flatten(0, -3),
            alpha=-1,
        )
        return Lacking(_within(apart, width, between), sums[..., 1:2, width:])


def _shares(count: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What makes shares of `count` means of their sizes, [2, 3, 1]: what is the same for all, and
    by what sizes are multiplied.
    """
    rows = [[1 / count, -1 / count, 0.0], [0.0, 1 / tokens, 1 / tokens]]
    return torch.tensor(rows, dtype=dtype, device=device).unsqueeze(-1)


def _outer(key: Tensor, value: Tensor, share: Tensor | float) -> Tensor:
    """sum_i share_i value_i key_i^T [..., D, D]."""
    root, exact = share**0.5, torch.promote_types(key.dtype, torch.float32)
    dtype = exact if key.dtype == torch.float16 else key.dtype  # whose range a covariance may leave
    key, value = ((root * t).to(dtype) for t in (key, value))
    with no_autocast(key):  # whose fp16 a covariance may leave too
        return (value.transpose(-1, -2) @ key).to(exact)


class Added(NamedTuple):
    """What attention lacks as kernels make it, both in fp32. Queries are multiplied by `product` [B
    * H, D, D']. `shift` [B * H, D'] (or none, [0, D']) is to be added to its output.
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
    proportional: bool,
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
        proportional: see `first_order_of_means`.
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
        proportional,
    )
    lacks = (
        None
        if found is None
        else fused.launched(
            kernels.lacking, *found, plan.tokens_kept, pos.samples, scale, proportional
        )
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
