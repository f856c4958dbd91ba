"""Slow, plain float64 loops: what every fast path is tested against, outputs and gradients.

`TokenPlan` is the paper's method (arXiv 2604.13432), `merged_attention` attention over merged keys.
`mame_sd.core.reference` has groups, plain images and restoring.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

REFINE_FLOOR = 1e-5  # of the library's settled form
RIDGE, SIZE_RIDGE, ROOM = 0.1, 1e-3, 0.25

# ----------------------------------------------------------------- the paper


def partition(tokens: int, kind: str) -> tuple[list[int], list[int]]:
    """Positions of destinations and sources."""
    if kind == "alternating":
        return list(range(0, tokens, 2)), list(range(1, tokens, 2))
    half = math.ceil(tokens / 2)
    return list(range(half)), list(range(half, tokens))


def similarity(x: Tensor, dst: list[int], src: list[int], metric: str) -> Tensor:
    """S [M, N] of x [L, d]."""
    to, of, scale = x[dst].unsqueeze(1), x[src], math.sqrt(x.shape[1])
    if metric == "euclidean":
        return -torch.linalg.vector_norm(to - of, dim=2) / scale
    s = (to * of).sum(2)
    if metric == "cosine":
        norms = torch.linalg.vector_norm(to, dim=2) * torch.linalg.vector_norm(of, dim=1)
        return (s / norms.masked_fill(norms == 0, 1)).clamp(-1, 1)
    return torch.softmax(s / scale, 0) if metric == "softmax" else s / scale


def settled_column(excess: Tensor, refine: bool) -> Tensor:
    """W^F of one source from its column of relu(S - tau) [M]: sums to 1, or is all 0 as that is."""
    if not bool((excess > 0).any()):
        return torch.zeros_like(excess)
    w = excess / excess.sum()
    if not refine:
        return w
    zeta = w.sum() / (w > 0).sum()
    refined = (w - zeta).relu()
    return w if bool(refined.sum() <= REFINE_FLOOR) else refined / refined.sum()


@dataclass(eq=False)
class TokenPlan:
    """MaMe and MaRe of tokens [B, L, d]: see `token_plan`.

    Attributes:
        weights: W^F [B, M, N].
        preserved: sources that stay, in all samples alike, as indices into `src`.
        dst, src: positions, the `prefix` tokens before them not counted.
    """

    weights: Tensor
    preserved: list[int]
    dst: list[int]
    src: list[int]
    prefix: int

    def merge(self, t: Tensor) -> Tensor:
        """[B, L, C] to [B, L', C]: prefix tokens, destinations, preserved sources."""
        out = []
        for w, sample in zip(self.weights, t.double(), strict=True):
            image = sample[self.prefix :]
            src = image[self.src]
            fused = (image[self.dst] + w @ src) / (1 + w.sum(1, keepdim=True))
            out.append(torch.cat([sample[: self.prefix], fused, src[self.preserved]]))
        return torch.stack(out)

    def restore(self, y: Tensor) -> Tensor:
        """[B, L', C] to [B, L, C], every token at its original position."""
        out = []
        order = torch.tensor([*self.dst, *self.src]).argsort()
        for w, sample in zip(self.weights, y.double(), strict=True):
            image = sample[self.prefix :]
            dst, stays = image[: len(self.dst)], image[len(self.dst) :]
            src = (w.T @ dst).index_copy(0, torch.tensor(self.preserved).long(), stays)
            out.append(torch.cat([sample[: self.prefix], torch.cat([dst, src])[order]]))
        return torch.stack(out)


def token_plan(
    x: Tensor,
    tau: float,
    metric: str = "cosine",
    kind: str = "alternating",
    refine: bool = True,
    prefix: int = 0,
) -> TokenPlan:
    """Make Algorithm 1's plan for x [B, L, d] in its settled form.

    A source stays in all samples if it has no destination above tau in any of them.
    """
    x = x.double()[:, prefix:]
    dst, src = partition(x.shape[1], kind)
    weights = x.new_zeros(len(x), len(dst), len(src))
    for b, sample in enumerate(x):
        for j, column in enumerate(similarity(sample, dst, src, metric).T):
            weights[b, :, j] = settled_column((column - tau).relu(), refine)
    preserved = [j for j in range(len(src)) if not bool((weights[:, :, j].sum(1) > 0).all())]
    weights[:, :, preserved] = 0
    return TokenPlan(weights, preserved, dst, src, prefix)


# -------------------------------------------------------------------- groups


def tiles_of(size: tuple[int, ...], tile_size: int) -> list[tuple[int, int]]:
    """Return the tile of each token of a sequence, an image or a video; sides are cut evenly.

    A video is cut as a plane of t * h rows, in which the rows y of all frames are neighbours.
    """
    frames, height, columns = (1, 1, *size)[-3:]
    rows = frames * height
    down = max(1, round(rows / tile_size)) if tile_size else 1
    wide = tile_size if rows > 1 else tile_size**2
    across = max(1, round(columns / wide)) if tile_size else 1
    return [
        ((y * frames + frame) * down // rows, x * across // columns)
        for frame in range(frames)
        for y in range(height)
        for x in range(columns)
    ]


def means(t: Tensor, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the means [.., K, C] of the groups of t [.., L, C], and their sizes [K]."""
    count = max(groups) + 1
    sums, sizes = t.new_zeros(*t.shape[:-2], count, t.shape[-1]), t.new_zeros(count)
    for token, group in enumerate(groups):
        sizes[group] += 1
        at = torch.tensor([group])
        sums = sums.index_add(-2, at, t[..., token : token + 1, :])
    return sums / sizes[:, None], sizes


# ----------------------------------------------------------------- attention


@dataclass(frozen=True)
class Image:
    """Tokens among the keys that merge.

    Attributes:
        start: where they begin.
        groups: of each sample the group of each token.
        kept: of each sample the position, among the image's, of the token that each group formed
            around: the column of a mask that differs among queries is taken from there.
    """

    start: int
    groups: list[list[int]]
    kept: list[list[int]]


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale + bias) v, and the weights; rows that see nothing give 0."""
    logits = scale * q @ k.transpose(-1, -2)
    if bias is not None:
        logits = logits.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else logits + bias
    weights = logits.softmax(-1).nan_to_num()
    return weights @ v, weights


def merged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    images: Sequence[Image],
    queries: Sequence[int] = (),
    mask: Tensor | None = None,
    scale: float | None = None,
    sized: Sequence[Sequence[int]] = (),
) -> tuple[Tensor, Tensor]:
    """Return attention [B, H, Q, D'] over merged keys, and the values [B, H', K, D'].

    Args:
        q: Queries [B, H, Q, D] in any precision.
        k: Keys [B, H', N, D]; there may be fewer heads than of queries.
        v: Values [B, H', N, D'].
        images: What merges, in order.
        queries: Positions in q that values are fitted to. If empty, values are means.
        mask: Boolean or added to the logits, broadcast to [B, H, Q, N]. If it is the same for all
            queries, members of groups are weighted by it.
        scale: Of the logits.
        sized: Positions in q of the queries of the image, and of all others, by which keys carry
            the sizes of their groups. If empty, the sizes are added to the logits.
    """
    q, k, v = q.double(), k.double(), v.double()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    heads, count, shared = k.shape[1], k.shape[2], q.shape[1] // k.shape[1]
    if mask is not None:
        mask = (mask if mask.dtype == torch.bool else mask.double()).expand(*q.shape[:3], count)
    outputs, values = [], []
    for b, h in itertools.product(range(len(q)), range(heads)):
        members, columns, merged = _kept(images, b, count)
        of_all = None if mask is None else _of_all_queries(mask[b])
        shares = [_shares(at, of_all) for at in members]
        key, value = (
            torch.stack([w @ t[b, h, at] / w.sum() for at, w in zip(members, shares, strict=True)])
            for t in (k, v)
        )
        log_sizes = torch.stack([w.sum() for w in shares]).log()
        if of_all is not None:  # a group is seen as the one of its members that is seen best
            columns = [max(at, key=lambda p: float(of_all[p])) for at in members]
        rows = slice(h * shared, (h + 1) * shared)  # heads of queries
        own, seen = q[b, rows], None if mask is None else mask[b, rows]
        bias = torch.zeros_like(log_sizes) if len(sized) else log_sizes
        bias = _with_mask(bias, None if seen is None else seen[..., columns])
        if len(sized):
            gram, ones = torch.zeros(2, dtype=q.dtype)
            for at in sized:
                some = own[:, list(at)].flatten(0, 1)
                weight = len(sized[0]) / max(len(at), 1)
                gram, ones = gram + weight * some.T @ some, ones + weight * some.sum(0)
            one = _ridged_inverse(gram, SIZE_RIDGE) @ ones
            key = key + log_sizes[:, None] * one / scale
        if len(queries):
            few = list(queries)
            seen, near = (t if t is None or t.dim() == 1 else t[:, few] for t in (seen, bias))
            exact = attend(own[:, few], k[b, h], v[b, h], scale, seen)[0].flatten(0, 1)
            a = attend(own[:, few], key, value, scale, near)[1].flatten(0, 1)
            lacking, a = exact - a @ value, a[:, merged]
            change = a.T @ (_ridged_inverse(a @ a.T, RIDGE) @ lacking)
            whole = v[b, h]
            if of_all is not None:
                whole = whole.masked_fill((of_all == -math.inf)[:, None], 0)
            low, high = whole.amin(0), whole.amax(0)
            room = ROOM * (high - low)
            value = torch.cat([value[: merged.start], value[merged] + change, value[merged.stop :]])
            value = value.clamp(low - room, high + room)  # of others only hidden ones leave it
        values.append(value)
        outputs.append(attend(own, key, value, scale, bias)[0])
    return torch.stack(outputs).view(*q.shape[:3], -1), torch.stack(values).unflatten(
        0, (-1, heads)
    )


def _of_all_queries(mask: Tensor) -> Tensor | None:
    """Return what a mask [H, Q, N] adds to the logits of each key, [N]; None if queries differ."""
    if bool((mask != mask[:1, :1]).any()):
        return None
    row = mask[0, 0]
    return torch.where(row, 0.0, -math.inf).double() if row.dtype == torch.bool else row


def _shares(at: list[int], of_all: Tensor | None) -> Tensor:
    """How much each member of a group counts, relative to the one that is seen best."""
    if of_all is None or bool((of_all[at] == -math.inf).all()):
        return torch.ones(len(at), dtype=torch.float64)
    return (of_all[at] - of_all[at].max()).exp()


def _kept(images: Sequence[Image], b: int, count: int) -> tuple[list[list[int]], list[int], slice]:
    """Return members and mask's column of each kept key of a sample, and the merged ones."""
    members: list[list[int]] = []
    columns: list[int] = []
    end = 0
    for image in images:
        alone, groups = range(end, image.start), image.groups[b]
        members += [[p] for p in alone]
        for number in range(max(groups) + 1):
            members.append([image.start + p for p, group in enumerate(groups) if group == number])
        columns += [*alone, *(image.start + p for p in image.kept[b])]
        end = image.start + len(groups)
    merged = slice(images[0].start, len(members))
    return members + [[p] for p in range(end, count)], [*columns, *range(end, count)], merged


def _ridged_inverse(gram: Tensor, ridge: float) -> Tensor:
    added = ridge * gram.diagonal().mean() + 1e-19
    return torch.linalg.inv(gram + added * torch.eye(len(gram), dtype=gram.dtype))


def _with_mask(bias: Tensor, mask: Tensor | None) -> Tensor:
    """Return what is added to the logits: the sizes' bias [K] and a mask [.., Q, K]."""
    if mask is None:
        return bias
    return torch.where(mask, bias, -math.inf) if mask.dtype == torch.bool else mask + bias
