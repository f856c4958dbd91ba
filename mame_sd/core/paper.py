"""Merge whole tokens before an attention and restore them after it: MaMe and MaRe.

This is the method of arXiv 2604.13432, Algorithms 1 and 2. Similarities of sources and destinations
give weights, by which sources are distributed over destinations (MaMe) and restored from them
(MaRe). Where the printed equations contradict one another, a consistent form is used: weights of a
source sum to 1, restoring does not divide a second time, and a source whose column refining would
empty keeps its unrefined weights.

>>> import torch
>>> from mame_sd import plan_tokens
>>> x = torch.ones(2, 64, 8)                                    # [B, L, d], 64 equal tokens
>>> plan = plan_tokens(x, tau=0.8)
>>> plan.tokens_in, plan.tokens_kept
(64, 32)
>>> y = plan.merge(x)                                           # [B, L', d]
>>> torch.allclose(plan.restore(y), x)  # every token at its own position again
True
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mame_sd.core.groups import cached_tensors, no_autocast

# Refining keeps what exceeds a column's mean. If that leaves at most this share of the column (a
# tie, up to rounding), the unrefined weights are used. Below it, rounding alone decides in fp32.
REFINE_FLOOR = 1e-5
METRICS = ("cosine", "dot", "euclidean", "softmax")
PARTITIONS = ("alternating", "sequential", "random")


@dataclass(eq=False)
class Plan:
    """A plan of merging: positions and weights, but no tokens.

    Attributes:
        weights: W^F [B, M, N]. The column of a source that merges sums to 1; other columns are all
            0.
        preserved: LongTensor [r], the sources that stay, the same for all samples, as indices into
            `src`.
        dst, src: LongTensor [M] and [N], the positions of destinations and sources.
        prefix: number of leading tokens that take no part.
        tokens_in, tokens_kept: L and L', prefix tokens included.
    """

    weights: Tensor
    preserved: Tensor
    dst: Tensor
    src: Tensor
    prefix: int = 0

    def __post_init__(self) -> None:
        self.tokens_in = self.prefix + len(self.dst) + len(self.src)
        self.tokens_kept = self.prefix + len(self.dst) + len(self.preserved)

    @property
    def counts(self) -> Tensor:
        """Return R_i = 1 + sum_j W^F_ij, [B, M]."""
        return 1 + self.weights.sum(-1)

    @property
    def sizes(self) -> Tensor:
        """Return the number of tokens that each merged token stands for, [B, L'].

        The numbers of a sample sum to L.
        """
        counts = self.counts
        ones = counts.new_ones(counts.shape[0], self.prefix + self.preserved.shape[0])
        return torch.cat([ones[:, : self.prefix], counts, ones[:, self.prefix :]], 1)

    @property
    def kept(self) -> Tensor:
        """Return the positions of the merged tokens in their order, LongTensor [L']."""
        body = torch.cat([self.dst, self.src.index_select(0, self.preserved)]) + self.prefix
        return torch.cat([torch.arange(self.prefix, device=body.device), body])

    def _in_place(self, t: Tensor) -> Tensor:
        """Reorder prefix, destinations and sources [B, L, ...] to their original positions."""
        order = torch.cat([self.dst, self.src]) + self.prefix
        places = torch.arange(self.tokens_in, device=order.device)
        back = places.index_copy(0, order, places[self.prefix :])
        return t.index_select(1, back)

    def merge(self, t: Tensor) -> Tensor:
        """Merge tokens t [B, L, C] (Algorithm 1, "Token Aggregation and Preservation").

        Returns:
            X' = concat(X_spec, X''_dst, X_pres), [B, L', C] in the dtype of t.

        Raises:
            ValueError: `t` has another number of samples or tokens than planned.
        """
        self._check(t, self.tokens_in, "merge")
        body = t[:, self.prefix :]
        dst, src = body.index_select(1, self.dst), body.index_select(1, self.src)
        with no_autocast(t):
            counts = self.counts.unsqueeze(-1)
            # Multiply by shares, because sums can exceed fp16's range.
            share, single = (self.weights / counts).to(t.dtype), (1 / counts).to(t.dtype)
            parts = [torch.baddbmm(dst * single, share, src), src.index_select(1, self.preserved)]
        return torch.cat([t[:, : self.prefix], *parts], 1)

    def restore(self, y: Tensor) -> Tensor:
        """Restore all tokens from y [B, L', C] at their original positions (Algorithm 2).

        Returns:
            X^rec [B, L, C] in the dtype of y.

        Raises:
            ValueError: `y` has another number of samples or tokens than `merge` returns.
        """
        self._check(y, self.tokens_kept, "restore")
        first = self.prefix + len(self.dst)
        with no_autocast(y):
            dst = y[:, self.prefix : first]
            src = torch.bmm(self.weights.to(y.dtype).transpose(1, 2), dst)
        src = src.index_copy(1, self.preserved, y[:, first:])
        return self._in_place(torch.cat([y[:, :first], src], 1))

    def _check(self, t: Tensor, tokens: int, call: str) -> None:
        batch = self.weights.shape[0]
        if t.dim() != 3 or t.shape[:2] != (batch, tokens):
            raise ValueError(
                f"{call}: expected tokens [{batch}, {tokens}, C] as planned, got {list(t.shape)};"
                " plan again for another shape"
            )


def plan_tokens(
    x: Tensor,
    tau: float,
    num_prefix_tokens: int = 0,
    *,
    metric: str = "cosine",
    partition: str = "alternating",
    seed: int = 0,
    refine: bool = True,
) -> Plan:
    """Plan which tokens merge, from the similarity of the tokens of x (Algorithm 1).

    A source stays if in any sample of the batch no destination is above tau for it, or its
    similarity is NaN ("Batch Processing Implementation").

    Args:
        x: the feature that is compared, [B, L, d], floating point. It may differ from the tensor
            that is merged. Similarities and weights are fp32 (fp64 for fp64), under autocast too.
        tau: the similarity above which a source merges.
        num_prefix_tokens: number of leading tokens that take no part, such as a class token.
        metric: see `similarity`. This and the following are the paper's ablations.
        partition: see `split_positions`.
        seed: seed of a random partition.
        refine: see `fusion_weights`.

    Returns:
        The plan, whose `merge` and `restore` apply to any tokens [B, L, C].

    Raises:
        ValueError: x has a wrong shape or dtype, or a metric or partition is unknown.
    """
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(
            f"x: expected floating point tokens [B, L, d], got {x.dtype} {list(x.shape)}"
        )
    prefix = num_prefix_tokens
    if not 0 <= prefix < x.shape[1]:
        raise ValueError(
            f"num_prefix_tokens: expected fewer than the {x.shape[1]} tokens of x, got {prefix}"
        )
    for name, value, allowed in (("metric", metric, METRICS), ("partition", partition, PARTITIONS)):
        if value not in allowed:
            raise ValueError(
                f"{name}: expected {', '.join(allowed)}, got {value!r}; give one of them"
            )
    body = x[:, prefix:]
    dst, src = cached_tensors(split_positions, body.shape[1], partition, seed, x.device)
    with no_autocast(x):
        s = similarity(body.index_select(1, dst), body.index_select(1, src), metric)
        weights, merges = fusion_weights(s, tau, refine)
        stays = ~merges.all(0)
        weights = weights.masked_fill(stays, 0)
    return Plan(weights, stays.nonzero().squeeze(-1), dst, src, prefix)


def similarity(dst: Tensor, src: Tensor, metric: str = "cosine") -> Tensor:
    """Compute S [B, M, N] of destinations and sources ("Similarity-Based Fusion Matrix").

    Cosine is clamped to [-1, 1], and 0 for a zero token; dot is x.y / sqrt(d); euclidean is
    -|x - y| / sqrt(d); softmax is the softmax of dot over destinations.

    Args:
        dst: destinations [B, M, d].
        src: sources [B, N, d].
        metric: "cosine", "dot", "euclidean" or "softmax".

    Returns:
        S [B, M, N] in fp32 (fp64 for fp64).
    """
    dtype = torch.promote_types(dst.dtype, torch.float32)
    dst, src = dst.to(dtype), src.to(dtype)
    if metric == "cosine":
        return torch.bmm(_normed(dst), _normed(src).transpose(1, 2)).clamp(-1, 1)
    if metric == "euclidean":
        apart = torch.cdist(dst, src, compute_mode="donot_use_mm_for_euclid_dist")
        return apart * -(dst.shape[-1] ** -0.5)
    s = torch.bmm(dst * dst.shape[-1] ** -0.5, src.transpose(1, 2))
    return torch.softmax(s, 1) if metric == "softmax" else s


def _normed(x: Tensor) -> Tensor:
    """Scale tokens to length 1. A zero token stays 0, with gradient 0."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(norm == 0, 1.0, norm)


def fusion_weights(s: Tensor, tau: float, refine: bool = True) -> tuple[Tensor, Tensor]:
    """Compute the weights W^F of similarities S ("Adaptive Weight Refining").

    S+ = relu(S - tau), so merging needs S > tau. Refining keeps relu(S+ - mean of the positive S+
    of the column), to which the paper's W~ is proportional. A column that refining would empty
    keeps S+.

    Args:
        s: similarities S [B, M, N].
        tau: the threshold.
        refine: if False, weights are S+, not refined.

    Returns:
        W^F [B, M, N], and a bool [B, N] that is True for sources that merge.
    """
    above = torch.relu(s - tau)
    total = above.sum(1, keepdim=True)
    merges = total.squeeze(1) > 0
    if refine:
        mean = total / (above > 0).sum(1, keepdim=True).clamp_min(1)
        refined = torch.relu(above - mean)
        mass = refined.sum(1, keepdim=True)
        tie = mass <= REFINE_FLOOR * total
        above, total = torch.where(tie, above, refined), torch.where(tie, total, mass)
    return above / torch.where(total == 0, 1.0, total), merges


def split_positions(
    tokens: int, kind: str, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Partition the positions of tokens into destinations and sources ("Token Partitioning").

    Args:
        tokens: L.
        kind: "alternating" (destinations at 0, 2, 4, ...), "sequential" (the first half) or
            "random", drawn by `seed`.
        seed: seeds the generator of a random partition.
        device: device of the positions.

    Returns:
        LongTensors of destinations [ceil(L / 2)] and sources [floor(L / 2)].
    """
    every, m = torch.arange(tokens, device=device), (tokens + 1) // 2
    if kind == "alternating":
        return every[::2], every[1::2]
    if kind == "random":
        generator = torch.Generator().manual_seed(seed % 2**32)
        drawn = torch.randperm(tokens, generator=generator, device="cpu").to(device)
        return drawn[:m].sort().values, drawn[m:].sort().values
    return every[:m], every[m:]
