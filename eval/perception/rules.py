"""Define, as pure functions, what rivals do to a block's tokens between attention and MLP.

* `ToMe` (Bolya et al., arXiv 2210.09461): bipartite soft matching on the keys' mean over heads. It
  removes r tokens in every block, weights means by size and makes attention proportional;
* `EViT` (Liang et al., arXiv 2202.07800), without its training: the tokens that the class token
  attends to least become one;
* `RandomDrop`: a random share stays.

Special tokens come first, take no part and stay first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class BlockTokens:
    """What a rule gets in one block.

    Attributes:
        x: x' [B, L, C], prefix tokens first.
        place: number of blocks that have reduced the tokens before, of `places` in all.
        sizes: number of tokens that each one stands for, fp32 [B, L]. If None, 1 each.
        keys: the attention's keys [B, heads, L, d], or None if the rule doesn't ask for them.
        queries: the attention's queries [B, heads, L, d], or None if the rule doesn't ask for them.
        places: number of blocks that reduce tokens.
        capturing: True if the rule has to return which tokens it kept.
    """

    x: Tensor
    prefix: int
    place: int
    sizes: Tensor | None = None
    keys: Tensor | None = None
    queries: Tensor | None = None
    places: int = 1
    capturing: bool = False


@dataclass
class Reduced:
    """What a rule returns.

    Attributes:
        x: x'' [B, L', C].
        sizes: [B, L']. If None, 1 each.
        cost: multiply-adds for one image.
        kept: LongTensor [B, L'], the first of the tokens that each was made of, or None.
    """

    x: Tensor
    sizes: Tensor | None = None
    cost: int = 0
    kept: Tensor | None = None


class Rule:
    """One rival at one setting; this one leaves the tokens as they are, and counts them.

    Attributes:
        prop_attn: True if the log of a token's size is added to its attention logits.
        hears: what it needs of the attention, "keys" and "queries"; queries are those of a class
            token.
    """

    prop_attn: ClassVar[bool] = False
    hears: ClassVar[tuple[str, ...]] = ()

    def blocks(self, depth: int) -> tuple[int, ...]:
        """Return the indices of the blocks of `depth` in which it reduces the tokens."""
        return (depth - 1,)

    def __call__(self, tokens: BlockTokens) -> Reduced:
        """Reduce the tokens of one block."""
        return Reduced(tokens.x)


class EveryBlock(Rule):
    """A rule that reduces the tokens in every block."""

    def blocks(self, depth: int) -> tuple[int, ...]:
        """Return the indices of all blocks."""
        return tuple(range(depth))


def quarters(depth: int) -> tuple[int, ...]:
    """Return blocks 3, 6 and 9 of 12, or the same fractions of another depth.

    >>> quarters(12), quarters(24), quarters(4)
    ((3, 6, 9), (6, 12, 18), (1, 2, 3))
    """
    return tuple(sorted({depth // 4, depth // 2, 3 * depth // 4}))


def rows_of(x: Tensor, at: Tensor) -> Tensor:
    """Gather the tokens [B, K, C] of `x` [B, L, C] at the indices `at` [B, K]."""
    return x.gather(1, at.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


@dataclass(frozen=True)
class ToMe(EveryBlock):
    """Merge `r` tokens in every block, but at most half of the patches (ToMe).

    A fractional `r` is spread over the blocks. With `decreasing` (section 4 of the paper) the
    number falls linearly from 2 `r` in the first block to 0 in the last.
    """

    r: float
    decreasing: bool = False
    prop_attn: ClassVar[bool] = True
    hears: ClassVar[tuple[str, ...]] = ("keys",)

    def fewer(self, place: int, places: int) -> int:
        """Return how many tokens block `place` of `places` merges, if it has enough patches.

        >>> [ToMe(2.5).fewer(place, 4) for place in range(4)], ToMe(8).fewer(5, 12)
        ([3, 2, 3, 2], 8)
        >>> [ToMe(8, decreasing=True).fewer(place, 5) for place in range(5)]
        [16, 12, 8, 4, 0]
        """
        if self.decreasing:
            return round(2 * self.r * (1 - place / (places - 1)))
        return math.floor(self.r * (place + 1) + 0.5) - math.floor(self.r * place + 0.5)

    def __call__(self, tokens: BlockTokens) -> Reduced:
        """Merge the `fewer` most similar pairs."""
        assert tokens.keys is not None
        x, metric = tokens.x, tokens.keys.mean(1)
        sizes = (
            x.new_ones(x.shape[:2], dtype=torch.float32) if tokens.sizes is None else tokens.sizes
        )
        r = min(self.fewer(tokens.place, tokens.places), (x.shape[1] - tokens.prefix) // 2)
        if r < 1:
            return Reduced(x, sizes)
        merge = bipartite_soft_matching(metric, r, tokens.prefix)
        weight = sizes.unsqueeze(-1)
        merged, size = merge(x * weight.to(x.dtype)), merge(weight)
        odd = x.shape[1] // 2 - tokens.prefix // 2
        cost = (x.shape[1] - tokens.prefix - odd) * odd * metric.shape[-1]
        kept = None
        if tokens.capturing:
            places = torch.arange(x.shape[1], device=x.device).expand(len(x), -1).unsqueeze(-1)
            kept = merge(places, True).squeeze(-1)
        return Reduced(merged / size.to(x.dtype), size.squeeze(-1), cost, kept)


def bipartite_soft_matching(metric: Tensor, r: int, prefix: int) -> Callable[..., Tensor]:
    """Match tokens by bipartite soft matching (ToMe, section 3).

    Each token of A, at even places, has one edge, to the most similar token of B, at odd places;
    the r most similar edges merge.

    Args:
        metric: [B, L, d], compared by cosine.
        r: number of edges to merge, at most the number of tokens of A.
        prefix: number of leading tokens that take no part.

    Returns:
        A function that sums merging tokens of [B, L, C], or takes their minimum if its second
        argument is True, and returns [B, L - r, C]: the prefix tokens, the rest of A, then B. The
        rest of A keeps its order if there are prefix tokens; otherwise the most similar come first,
        as published.
    """
    tokens = torch.arange(metric.shape[1], device=metric.device)[prefix:]
    a, b = tokens[tokens % 2 == 0], tokens[tokens % 2 == 1]
    metric = F.normalize(metric, dim=-1)
    best, target = (metric[:, a] @ metric[:, b].transpose(1, 2)).max(-1)  # [B, |A|]
    edges = best.argsort(dim=-1, descending=True)
    merging, rest = edges[:, :r], edges[:, r:]
    if prefix:
        rest = rest.sort(dim=-1).values
    joined = target.gather(1, merging)  # places in B

    def merge(x: Tensor, first: bool = False) -> Tensor:
        sources, at = x[:, a], joined.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        joining = rows_of(sources, merging)
        if first:
            reduced = x[:, b].scatter_reduce(1, at, joining, "amin")
        else:  # as published, and faster than scatter_reduce
            reduced = x[:, b].scatter_add(1, at, joining)
        return torch.cat([x[:, :prefix], rows_of(sources, rest), reduced], 1)

    return merge


def class_attention(tokens: BlockTokens) -> Tensor:
    """Return the class token's attention to each patch [B, patches], the mean over heads, fp32."""
    assert tokens.keys is not None
    assert tokens.queries is not None
    queries = tokens.queries[:, :, :1]
    logits = (queries @ tokens.keys.transpose(2, 3) * queries.shape[-1] ** -0.5).float()
    if tokens.sizes is not None:
        logits = logits + tokens.sizes.log()[:, None, None]
    return logits.softmax(-1)[:, :, 0, tokens.prefix :].mean(1)


@dataclass(frozen=True)
class EViT(Rule):
    """Keep the share of tokens that the class token attends to most, in three blocks as published.

    The attention is averaged over heads. The other tokens become one, their sum weighted by that
    attention.
    """

    keep: float
    hears: ClassVar[tuple[str, ...]] = ("keys", "queries")

    def blocks(self, depth: int) -> tuple[int, ...]:
        """Return the three blocks."""
        return quarters(depth)

    def __call__(self, tokens: BlockTokens) -> Reduced:
        """Keep the share of tokens, and sum up the others."""
        attention, x, prefix = class_attention(tokens), tokens.x, tokens.prefix
        width = x.shape[-1]
        left = math.ceil(self.keep * attention.shape[1])
        if left >= attention.shape[1]:
            return Reduced(x, cost=width * x.shape[1])
        order, body = attention.argsort(dim=-1, descending=True), x[:, prefix:]
        weights = attention.gather(1, order[:, left:]).to(x.dtype).unsqueeze(1)
        rest = weights @ rows_of(body, order[:, left:])
        cost = width * (x.shape[1] + order.shape[1] - left)
        return Reduced(
            torch.cat([x[:, :prefix], rows_of(body, order[:, :left]), rest], 1), None, cost
        )


@dataclass(frozen=True)
class RandomDrop(EveryBlock):
    """A random share `keep` of the patches stays, different for each sample of a batch."""

    keep: float
    seed: int = 0

    def __call__(self, tokens: BlockTokens) -> Reduced:
        """Keep a random share of the patches."""
        x, prefix = tokens.x, tokens.prefix
        patches = x.shape[1] - prefix
        generator = torch.Generator(x.device).manual_seed(self.seed * 1000 + tokens.place)
        drawn = torch.rand(len(x), patches, generator=generator, device=x.device)
        at = drawn.topk(max(1, round(self.keep * patches)), dim=-1).indices.sort(dim=-1).values
        return Reduced(torch.cat([x[:, :prefix], rows_of(x[:, prefix:], at)], 1))
