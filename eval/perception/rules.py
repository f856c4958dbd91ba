"""What rivals do to the tokens of one block, between attention and MLP: pure functions of tensors.

* `ToMe` (Bolya et al., arXiv 2210.09461): bipartite soft matching on the keys' mean over heads. It
  leaves r tokens fewer in every block, weighs means by size and makes attention proportional;
* `EViT` (Liang et al., arXiv 2202.07800), without its training: the tokens that the class token
  attends to least become one;
* `DiffRate` (Chen et al., arXiv 2305.17997), off the shelf: its published rates of pruning and
  merging, by the class token's attention;
* `RandomDrop`: a random share stays.

Special tokens stand first, take no part and stay first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.runs.methods import NotApplicable


@dataclass
class Given:
    """What a rule is given in one block.

    Attributes:
        x: x' [B, L, C], prefix tokens first.
        prefix: how many of them.
        place: how many blocks have reduced the tokens before, of `places` in all.
        sizes: how many tokens each one stands for, fp32 [B, L]; None: 1 each.
        keys, queries: the attention's [B, heads, L, d]; None where the rule does not ask for them.
        told: whether it has to tell what it kept.
    """

    x: Tensor
    prefix: int
    place: int
    sizes: Tensor | None = None
    keys: Tensor | None = None
    queries: Tensor | None = None
    places: int = 1
    told: bool = False


@dataclass
class Reduced:
    """What a rule gives.

    Attributes:
        x: x'' [B, L', C].
        sizes: [B, L'], None: 1 each.
        cost: multiply-adds for one image.
        kept: LongTensor [B, L'], the first of the tokens that each was made of; None: not told.
    """

    x: Tensor
    sizes: Tensor | None = None
    cost: int = 0
    kept: Tensor | None = None


class Rule:
    """One rival at one setting; this one leaves the tokens as they are, and counts them.

    Attributes:
        prop_attn: the log of a token's size is added to its attention logits.
        hears: what of the attention it is given, "keys" and "queries"; queries are those of a class
            token.
    """

    prop_attn: ClassVar[bool] = False
    hears: ClassVar[tuple[str, ...]] = ()

    def blocks(self, depth: int) -> tuple[int, ...]:
        """The blocks of `depth` in which it reduces the tokens, counted from 0."""
        return (depth - 1,)

    def __call__(self, given: Given) -> Reduced:
        return Reduced(given.x)


class EveryBlock(Rule):
    """A rule that reduces the tokens in every block."""

    def blocks(self, depth: int) -> tuple[int, ...]:
        return tuple(range(depth))


def quarters(depth: int) -> tuple[int, ...]:
    """Blocks 3, 6 and 9 of 12; of another depth those as far up.

    >>> quarters(12), quarters(24), quarters(4)
    ((3, 6, 9), (6, 12, 18), (1, 2, 3))
    """
    return tuple(sorted({depth // 4, depth // 2, 3 * depth // 4}))


def rows_of(x: Tensor, at: Tensor) -> Tensor:
    """The tokens [B, K, C] of `x` [B, L, C] at `at` [B, K]."""
    return x.gather(1, at.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


@dataclass(frozen=True)
class ToMe(EveryBlock):
    """Token merging: `r` tokens fewer in every block, at most half of the patches.

    A fraction of `r` is spread over the blocks. `decreasing` (section 4 of the paper): from 2 `r`
    fewer in the first block down to 0 in the last.
    """

    r: float
    decreasing: bool = False
    prop_attn: ClassVar[bool] = True
    hears: ClassVar[tuple[str, ...]] = ("keys",)

    def fewer(self, place: int, places: int) -> int:
        """How many tokens it merges in the block of that place, where there are enough.

        >>> [ToMe(2.5).fewer(place, 4) for place in range(4)], ToMe(8).fewer(5, 12)
        ([3, 2, 3, 2], 8)
        >>> [ToMe(8, decreasing=True).fewer(place, 5) for place in range(5)]
        [16, 12, 8, 4, 0]
        """
        if self.decreasing:
            return round(2 * self.r * (1 - place / (places - 1)))
        return math.floor(self.r * (place + 1) + 0.5) - math.floor(self.r * place + 0.5)

    def __call__(self, given: Given) -> Reduced:
        assert given.keys is not None
        x, metric = given.x, given.keys.mean(1)
        sizes = x.new_ones(x.shape[:2], dtype=torch.float32) if given.sizes is None else given.sizes
        r = min(self.fewer(given.place, given.places), (x.shape[1] - given.prefix) // 2)
        if r < 1:
            return Reduced(x, sizes)
        merge = bipartite_soft_matching(metric, r, given.prefix)
        weight = sizes.unsqueeze(-1)
        merged, size = merge(x * weight.to(x.dtype)), merge(weight)
        odd = x.shape[1] // 2 - given.prefix // 2
        cost = (x.shape[1] - given.prefix - odd) * odd * metric.shape[-1]
        kept = None
        if given.told:
            places = torch.arange(x.shape[1], device=x.device).expand(len(x), -1).unsqueeze(-1)
            kept = merge(places, True).squeeze(-1)
        return Reduced(merged / size.to(x.dtype), size.squeeze(-1), cost, kept)


def bipartite_soft_matching(metric: Tensor, r: int, prefix: int) -> Callable[..., Tensor]:
    """Match tokens by bipartite soft matching (ToMe, section 3): each token of A, at even places,
    has one edge, to the most similar of B, at odd places; the r most similar edges merge.

    Args:
        metric: [B, L, d], compared by cosine.
        r: edges to merge, at most as many as A has tokens.
        prefix: leading tokens that take no part.

    Returns:
        What sums up merging tokens of [B, L, C], or takes the least of them as a second argument
        says, and gives [B, L - r, C]. These are the prefix tokens, the rest of A, then B. The rest
        of A keeps its order where there are prefix tokens. Elsewhere the most similar come first,
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


def class_attention(given: Given) -> Tensor:
    """Attention of the class token to each patch [B, patches], the mean over heads, fp32."""
    assert given.keys is not None
    assert given.queries is not None
    queries = given.queries[:, :, :1]
    logits = (queries @ given.keys.transpose(2, 3) * queries.shape[-1] ** -0.5).float()
    if given.sizes is not None:
        logits = logits + given.sizes.log()[:, None, None]
    return logits.softmax(-1)[:, :, 0, given.prefix :].mean(1)


@dataclass(frozen=True)
class EViT(Rule):
    """The share `keep` of the tokens stays to which the class token attends most (mean over heads),
    in three blocks as published.

    The others become one token, the sum of them weighted by that attention, as published.
    """

    keep: float
    hears: ClassVar[tuple[str, ...]] = ("keys", "queries")

    def blocks(self, depth: int) -> tuple[int, ...]:
        return quarters(depth)

    def __call__(self, given: Given) -> Reduced:
        attention, x, prefix = class_attention(given), given.x, given.prefix
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


# How many tokens DiffRate leaves in each block after pruning and after merging, as its repository
# (OpenGVLab/DiffRate, compression_rate.json) has them for the FLOPs of the paper's table 1.
RATES: dict[str, tuple[str, str]] = {
    "deit-s": (
        "197 192 168 143 121 105 92 74 62 45 33 3",
        "197 180 156 127 109 98 80 66 52 37 31 3",
    ),
    "deit-b": (
        "197 192 172 156 131 107 90 72 56 33 17 3",
        "197 178 162 141 115 96 78 60 47 21 13 3",
    ),
    "mae-b": (
        "197 192 166 143 119 103 86 72 54 43 37 23",
        "197 176 150 127 107 92 76 58 47 41 23 23",
    ),
    "mae-l": (
        "197 195 188 179 168 157 146 143 131 121 111 102 93 85 76 70 61 53 47 35 31 26 21 14",
        "197 191 184 172 161 151 145 135 125 117 106 96 89 80 72 64 54 50 40 27 27 23 14 14",
    ),
    "mae-h": (
        "257 257 257 257 248 250 240 239 229 209 160 159 149 111 109 106 104 106 101 104 85 96 88"
        " 93 94 88 88 91 81 78 76 75",
        "257 257 257 249 242 241 239 229 209 203 159 150 124 107 107 101 100 101 104 89 101 88 89"
        " 88 91 86 86 83 78 78 75 75",
    ),
}


@dataclass(frozen=True)
class DiffRate(EveryBlock):
    """DiffRate without its training, at the published rates of `rates`, one of RATES.

    In each block the patches are sorted by the class token's attention, the last are dropped, and
    of those left the last join the most similar of the others: as their plain mean, and with sizes
    that count a joined token by its similarity.
    """

    rates: str
    prop_attn: ClassVar[bool] = True
    hears: ClassVar[tuple[str, ...]] = ("keys", "queries")

    def __call__(self, given: Given) -> Reduced:
        x, prefix = given.x, given.prefix
        pruned, merged = ([int(n) for n in text.split()] for text in RATES[self.rates])
        fits = given.place > 0 or x.shape[1] == pruned[0]
        if given.places != len(pruned) or prefix != 1 or not fits:
            raise NotApplicable(
                f"expected {len(pruned)} blocks and {pruned[0]} tokens, one of them for the class,"
                f" which DiffRate's rates of {self.rates} are for, got {given.places} and"
                f" {x.shape[1]}; choose other rates"
            )
        sizes = x.new_ones(x.shape[:2], dtype=torch.float32) if given.sizes is None else given.sizes
        order = class_attention(given).argsort(dim=-1, descending=True) + prefix
        order = torch.cat([order.new_zeros(len(x), 1), order], 1)[:, : pruned[given.place]]
        x, sizes = rows_of(x, order), sizes.gather(1, order)
        kept, cost = min(merged[given.place], x.shape[1]), given.x.shape[1] * x.shape[2]
        if kept < x.shape[1]:
            unit = F.normalize(x, dim=-1)
            alike = unit[:, kept:] @ unit[:, :kept].transpose(1, 2)
            alike[..., 0] = -torch.inf  # nothing joins the class token
            most, target = alike.max(-1)
            at = target.unsqueeze(-1).expand(-1, -1, x.shape[-1])
            cost += alike.shape[1] * alike.shape[2] * x.shape[-1]
            joined = sizes[:, kept:] * most.clamp(min=0).to(sizes.dtype)
            sizes = sizes[:, :kept].scatter_add(1, target, joined)
            x = x[:, :kept].scatter_reduce(1, at, x[:, kept:], "mean")
        return Reduced(x, sizes, cost)


@dataclass(frozen=True)
class RandomDrop(EveryBlock):
    """A random share `keep` of the patches stays, others for each sample of a batch."""

    keep: float
    seed: int = 0

    def __call__(self, given: Given) -> Reduced:
        x, prefix = given.x, given.prefix
        patches = x.shape[1] - prefix
        generator = torch.Generator(x.device).manual_seed(self.seed * 1000 + given.place)
        drawn = torch.rand(len(x), patches, generator=generator, device=x.device)
        at = drawn.topk(max(1, round(self.keep * patches)), dim=-1).indices.sort(dim=-1).values
        return Reduced(torch.cat([x[:, :prefix], rows_of(x[:, prefix:], at)], 1))
