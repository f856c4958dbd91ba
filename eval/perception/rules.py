"""What rivals do to the tokens of one block, between attention and MLP: pure functions of tensors.

* `ToMe` (Bolya et al., arXiv 2210.09461): bipartite soft matching on the keys' mean over heads. It
  leaves r tokens fewer in every block, weighs means by size and makes attention proportional;
* `EViT` (Liang et al., arXiv 2202.07800), without its training: the tokens that the class token
  attends to least become one;
* `RandomDrop`: a random share stays.

Special tokens stand first, take no part and stay first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Given:
    """What a rule is given in one block.

    Attributes:
        x: x' [B, L, C], prefix tokens first.
        prefix: how many of them.
        place: how many blocks have reduced the tokens before, of `places` in all.
        sizes: [B, L] how many tokens each one stands for, fp32; None: 1 each.
        coords: [B, patches, 2] where the patches lie in it, for rules that only drop some.
        keys, queries: the attention's [B, heads, L, d]; None where the rule does not ask for them.
    """

    x: Tensor
    prefix: int
    place: int
    sizes: Tensor | None = None
    keys: Tensor | None = None
    queries: Tensor | None = None
    coords: Tensor | None = None
    places: int = 1


@dataclass
class Reduced:
    """What a rule gives.

    Attributes:
        x: x'' [B, L', C].
        sizes: [B, L'], None: 1 each.
        cost: multiply-adds for one image.
        rows: [B, L], which of the tokens of `x` stands for each token; None: unknown.
    """

    x: Tensor
    sizes: Tensor | None = None
    cost: int = 0
    rows: Tensor | None = None


class Rule:
    """One rival at one setting.

    Attributes:
        prop_attn: the log of a token's size is added to its attention logits.
        hears: what of the attention it is given, "keys" and "queries".
        class_token: it works by a class token.
    """

    prop_attn: bool = False
    hears: ClassVar[tuple[str, ...]] = ()
    class_token: ClassVar[bool] = False

    def blocks(self, depth: int) -> tuple[int, ...]:
        """The blocks of `depth` in which it reduces the tokens, counted from 0: a quarter, half and
        three quarters of the way.
        """
        return quarters(depth)

    def __call__(self, given: Given) -> Reduced:
        raise NotImplementedError


def quarters(depth: int) -> tuple[int, ...]:
    """Blocks 3, 6 and 9 of 12; of another depth those as far up.

    >>> quarters(12), quarters(24), quarters(4)
    ((3, 6, 9), (6, 12, 18), (1, 2, 3))
    """
    return tuple(sorted({depth // 4, depth // 2, 3 * depth // 4}))


class Unchanged(Rule):
    """All tokens stay: what the unmerged model is counted with."""

    def blocks(self, depth: int) -> tuple[int, ...]:
        """The last."""
        return (depth - 1,)

    def __call__(self, given: Given) -> Reduced:
        return Reduced(given.x)


@dataclass(frozen=True)
class ToMe(Rule):
    """Token merging: `r` tokens fewer in every block, at most half of the patches.

    A fraction of `r` is spread over the blocks.
    """

    r: float
    prop_attn: bool = True
    hears: ClassVar[tuple[str, ...]] = ("keys",)

    def blocks(self, depth: int) -> tuple[int, ...]:
        """All."""
        return tuple(range(depth))

    def fewer(self, place: int, places: int) -> int:
        """How many tokens it merges in the block of that place, where there are enough.

        >>> [ToMe(2.5).fewer(place, 4) for place in range(4)], ToMe(8).fewer(5, 12)
        ([3, 2, 3, 2], 8)
        """
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
        sources, destinations = matched_sets(x.shape[1], given.prefix)
        cost = len(sources) * len(destinations) * metric.shape[-1]
        return Reduced(merged / size.to(x.dtype), size.squeeze(-1), cost, merge.rows())


def matched_sets(tokens: int, prefix: int) -> tuple[range, range]:
    """Positions of sets A and B: every other token, the first one in A; without prefix tokens,
    which nothing merges with.
    """
    return range(prefix + prefix % 2, tokens, 2), range(prefix + (prefix + 1) % 2, tokens, 2)


@dataclass(frozen=True)
class DecreasingToMe(ToMe):
    """ToMe with its decreasing schedule (section 4): from 2 `r` fewer in the first block down to 0
    in the last.
    """

    def fewer(self, place: int, places: int) -> int:
        """See `ToMe`.

        >>> [DecreasingToMe(8).fewer(place, 5) for place in range(5)]
        [16, 12, 8, 4, 0]
        """
        return round(2 * self.r * (1 - place / (places - 1)))


@dataclass(frozen=True)
class Matching:
    """Which edges of A merge into B.

    Attributes:
        sets: positions of A and B.
        merging, rest, target: [B, r], [B, |A| - r] rows of A that merge and that stay, [B, r] rows
            of B that they join.
        prefix: leading tokens that take no part.
    """

    sets: tuple[Tensor, Tensor]
    merging: Tensor
    rest: Tensor
    target: Tensor
    prefix: int

    def __call__(self, x: Tensor) -> Tensor:
        """Tokens [B, L, C] with those that merge summed up, [B, L - r, C]."""

        def rows(source: Tensor, at: Tensor) -> Tensor:
            return source.gather(1, at.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

        sources, kept = x[:, self.sets[0]], x[:, self.sets[1]]
        at = self.target.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        summed = kept.scatter_add(1, at, rows(sources, self.merging))
        return torch.cat([x[:, : self.prefix], rows(sources, self.rest), summed], 1)

    def rows(self) -> Tensor:
        """LongTensor [B, L]: which of the merged tokens each token went to."""
        a, b = self.sets
        count = len(self.merging)
        first = self.prefix + self.rest.shape[1]  # where B stands after merging
        found = torch.zeros(count, self.prefix + len(a) + len(b), dtype=torch.long, device=a.device)
        found[:, : self.prefix] = torch.arange(self.prefix, device=a.device)
        found[:, b] = torch.arange(first, first + len(b), device=a.device)
        stays = torch.arange(self.prefix, first, device=a.device).expand(count, -1)
        in_a = torch.zeros(count, len(a), dtype=torch.long, device=a.device)
        in_a.scatter_(1, self.rest, stays).scatter_(1, self.merging, self.target + first)
        found[:, a] = in_a
        return found


def bipartite_soft_matching(metric: Tensor, r: int, prefix: int) -> Matching:
    """Bipartite soft matching (ToMe, section 3): each token of A has one edge, to the most similar
    of B; the r most similar edges merge.

    Args:
        metric: [B, L, d], compared by cosine.
        r: edges to merge, at most as many as A has tokens.
        prefix: leading tokens that take no part.

    Returns:
        what sums up merging tokens of [B, L, C] and gives [B, L - r, C]. These are the prefix
        tokens, the rest of A, then B. The rest of A keeps its order where there are prefix tokens.
        Elsewhere the most similar come first, as published.
    """
    a, b = (
        torch.arange(one.start, one.stop, 2, device=metric.device)
        for one in matched_sets(metric.shape[1], prefix)
    )
    metric = F.normalize(metric, dim=-1)
    best, target = (metric[:, a] @ metric[:, b].transpose(1, 2)).max(-1)  # [B, |A|]
    edges = best.argsort(dim=-1, descending=True)
    merging, rest = edges[:, :r], edges[:, r:]
    if prefix:
        rest = rest.sort(dim=-1).values
    target = target.gather(1, merging)  # [B, r]

    return Matching((a, b), merging, rest, target, prefix)


@dataclass(frozen=True)
class EViT(Rule):
    """The share `keep` of the tokens stays to which the class token attends most (mean over heads),
    in three blocks as published.

    The others become one token, the sum of them weighted by that attention, as published.
    """

    keep: float
    hears: ClassVar[tuple[str, ...]] = ("keys", "queries")
    class_token: ClassVar[bool] = True

    def __call__(self, given: Given) -> Reduced:
        assert given.keys is not None
        assert given.queries is not None
        x, prefix, queries = given.x, given.prefix, given.queries[:, :, :1]
        logits = queries @ given.keys.transpose(2, 3) * queries.shape[-1] ** -0.5
        attention = logits.float().softmax(-1)[:, :, 0, prefix:].mean(1)  # [B, patches]
        width = given.keys.shape[1] * given.keys.shape[3]
        patches = x.shape[1] - prefix
        left = math.ceil(self.keep * patches)
        if left >= patches:
            return Reduced(x, cost=width * x.shape[1])
        order = attention.argsort(dim=-1, descending=True)
        body = x[:, prefix:]

        def rows(at: Tensor) -> Tensor:
            return body.gather(1, at.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

        weights = attention.gather(1, order[:, left:]).to(x.dtype).unsqueeze(1)
        parts = [x[:, :prefix], rows(order[:, :left]), weights @ rows(order[:, left:])]
        cost = width * x.shape[1] + (patches - left) * x.shape[-1]
        return Reduced(torch.cat(parts, 1), cost=cost)


@dataclass(frozen=True)
class RandomDrop(Rule):
    """A random share `keep` of the patches stays, others for each sample of a batch, in three
    blocks unless others are named.
    """

    keep: float
    seed: int = 0

    def __call__(self, given: Given) -> Reduced:
        x, prefix = given.x, given.prefix
        patches = x.shape[1] - prefix
        generator = torch.Generator(x.device).manual_seed(self.seed * 1000 + given.place)
        drawn = torch.rand(len(x), patches, generator=generator, device=x.device)
        at = drawn.topk(max(1, round(self.keep * patches)), dim=-1).indices.sort(dim=-1).values
        body = x[:, prefix:].gather(1, at.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        rows = None
        if (
            given.coords is not None
        ):  # what is dropped is seen again as the patch that is nearest in the image
            kept = given.coords.gather(1, at.unsqueeze(-1).expand(-1, -1, 2))
            nearest = torch.cdist(given.coords.float(), kept.float()).argmin(-1) + prefix
            first = torch.arange(prefix, device=x.device).expand(len(x), -1)
            rows, given.coords = torch.cat([first, nearest], 1), kept
        return Reduced(torch.cat([x[:, :prefix], body], 1), rows=rows)
