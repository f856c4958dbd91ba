"""Slow, plain float64 loops: what every fast path is tested against, outputs and gradients.

* The paper's method (arXiv 2604.13432): `algorithm_1` and `algorithm_2` follow its pseudo-code line
  by line, its last line `W / Mask` included, whose columns sum to more than 1. `TokenPlan` is the
  settled form, which the library computes.
* Groups by the nearest destination of a tile, the farthest tokens alone: `grouped`.
* Attention over kept keys, sizes counted and values fitted by an explicit inverse: `Attended`.

One token, or one sample, is computed at a time. Everything is differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

REFINE_FLOOR = 1e-5  # of the library's settled form
RIDGE, SIZE_RIDGE = 0.1, 1e-3

# ----------------------------------------------------------------- the paper


def partition(tokens: int, kind: str) -> tuple[list[int], list[int]]:
    """Positions of destinations and sources."""
    if kind == "alternating":
        return list(range(0, tokens, 2)), list(range(1, tokens, 2))
    half = math.ceil(tokens / 2)
    return list(range(half)), list(range(half, tokens))


def similarity(x: Tensor, dst: list[int], src: list[int], metric: str) -> list[Tensor]:
    """For each source of x [L, d] its column of S [M]."""
    to, scale, columns = x[dst], math.sqrt(x.shape[1]), []
    for q in src:
        if metric == "euclidean":
            column = -torch.linalg.vector_norm(to - x[q], dim=1) / scale
        elif metric == "cosine":
            zero = (to == 0).all(1) | (x[q] == 0).all()
            norms = torch.linalg.vector_norm(to, dim=1) * torch.linalg.vector_norm(x[q])
            column = ((to * x[q]).sum(1) / norms.masked_fill(zero, 1)).clamp(-1, 1)
            column = column.masked_fill(zero, 0)
        else:
            column = (to * x[q]).sum(1) / scale
        columns.append(torch.softmax(column, 0) if metric == "softmax" else column)
    return columns


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
            rows = list(sample[: self.prefix])
            for i, p in enumerate(self.dst):
                fused = image[p] + sum(w[i, j] * image[q] for j, q in enumerate(self.src))
                rows.append(fused / (1 + w[i].sum()))
            rows += [image[self.src[j]] for j in self.preserved]
            out.append(torch.stack(rows))
        return torch.stack(out)

    def restore(self, y: Tensor) -> Tensor:
        """[B, L', C] to [B, L, C], every token at its original position."""
        out = []
        for w, sample in zip(self.weights, y.double(), strict=True):
            rows = dict(enumerate(sample[: self.prefix]))
            merged = sample[self.prefix : self.prefix + len(self.dst)]
            rest = iter(sample[self.prefix + len(self.dst) :])
            for i, p in enumerate(self.dst):
                rows[self.prefix + p] = merged[i]
            for j, q in enumerate(self.src):
                back = next(rest) if j in self.preserved else (w[:, j, None] * merged).sum(0)
                rows[self.prefix + q] = back
            out.append(torch.stack([rows[p] for p in range(len(rows))]))
        return torch.stack(out)


def token_plan(
    x: Tensor,
    tau: float,
    metric: str = "cosine",
    kind: str = "alternating",
    refine: bool = True,
    prefix: int = 0,
) -> TokenPlan:
    """Algorithm 1's plan for x [B, L, d] in its settled form; a source stays in all samples where
    it has no destination above tau in any of them.
    """
    x = x.double()[:, prefix:]
    dst, src = partition(x.shape[1], kind)
    found = [
        [
            settled_column((column - tau).relu(), refine)
            for column in similarity(sample, dst, src, metric)
        ]
        for sample in x
    ]
    preserved = [
        j for j in range(len(src)) if any(not bool(columns[j].sum() > 0) for columns in found)
    ]
    for columns in found:
        for j in preserved:
            columns[j] = torch.zeros_like(columns[j])
    weights = [torch.stack(c, 1) if c else x.new_zeros(len(dst), 0) for c in found]
    return TokenPlan(torch.stack(weights), preserved, dst, src, prefix)


def algorithm_1(
    x: Tensor, tau: float, dst: list[int], src: list[int], eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 1 as printed, for x [L, d]: X' [L', d], W^F [M, N] and Mask [N]."""
    x = x.double()
    m, n = len(dst), len(src)
    s = similarity(x, dst, src, "cosine")
    mask, final = x.new_zeros(n), x.new_zeros(m, n)
    for j in range(n):
        excess = [(s[j][i] - tau).relu() for i in range(m)]
        w = [e / (sum(excess) + eps) for e in excess]
        count = sum(int(one > 0) for one in w)
        zeta = sum(w) / (count + eps)
        mask[j] = sum((one - zeta).relu() for one in w)
        for i in range(m):
            final[i, j] = w[i] / (mask[j] + eps)
    rows = [
        (x[p] + sum(final[i, j] * x[q] for j, q in enumerate(src))) / (1 + final[i].sum())
        for i, p in enumerate(dst)
    ]
    rows += [x[src[j]] for j in range(n) if mask[j] == 0]
    return torch.stack(rows), final, mask


def algorithm_2(y: Tensor, final: Tensor, mask: Tensor, dst: list[int], src: list[int]) -> Tensor:
    """Algorithm 2 as printed, for y [L', C], to the original positions [L, C].

    `mask` is Algorithm 1's: a source is preserved where it is 0 (Algorithm 2 writes that condition
    the other way round).
    """
    rows = {p: y[i] / (final[i].sum() + 1) for i, p in enumerate(dst)}
    preserved = iter(y[len(dst) :])
    for j, q in enumerate(src):
        kept = sum(final[i, j] * rows[p] for i, p in enumerate(dst))
        rows[q] = next(preserved) if mask[j] == 0 else kept
    return torch.stack([rows[p] for p in range(len(rows))])


# -------------------------------------------------------------------- groups


def tiles_of(rows: int, columns: int, tile_size: int) -> list[tuple[int, int]]:
    """The tile of each token of a plane, row after row: sides are cut as evenly as can be."""
    down = max(1, round(rows / tile_size)) if tile_size else 1
    wide = tile_size if rows > 1 else tile_size**2
    across = max(1, round(columns / wide)) if tile_size else 1
    return [(y * down // rows, x * across // columns) for y in range(rows) for x in range(columns)]


def grouped(
    x: Tensor, dst: list[int], tile: Sequence[tuple[int, int]], stay: int = 0
) -> tuple[list[int], list[int]]:
    """For each token of x [L, d] the number of its group, and the tokens that groups form around.

    A token joins the nearest destination of its tile; the `stay` farthest ones are groups of their
    own, behind the others.
    """
    x, found, far = x.double(), [], []
    for p, token in enumerate(x):
        apart = {
            number: float(torch.linalg.vector_norm(token - x[q]))
            for number, q in enumerate(dst)
            if tile[p] == tile[q]
        }
        nearest = dst.index(p) if p in dst else min(apart, key=lambda number: apart[number])
        found.append(nearest)
        far.append(-1.0 if p in dst else apart[nearest])
    alone = sorted(sorted(range(len(x)), key=lambda p: -far[p])[:stay])
    for number, p in enumerate(alone, len(dst)):
        found[p] = number
    return found, [*dst, *alone]


def means(t: Tensor, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The means [.., K, C] of the groups of t [.., L, C], and their sizes [K]."""
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
            around: a mask's column is taken from there.
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
    """Attention of q [B, H, Q, D] over merged keys, [B, H, Q, D'], and the values [B, H', K, D'].

    Args:
        q, k, v: in any precision; there may be fewer heads of keys than of queries.
        images: what merges, in order.
        queries: positions in q that values are fitted to; none: values are means.
        mask: boolean or added to the logits, broadcast to [B, H, Q, N].
        scale: of the logits.
        sized: positions in q of the queries of the image, and of all others, by which keys carry
            the sizes of their groups; none: logits count them.
    """
    q, k, v = q.double(), k.double(), v.double()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    shared, count, outputs, values = q.shape[1] // k.shape[1], k.shape[2], [], []
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask.double()
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], count)
    for b in range(q.shape[0]):
        parts: list[tuple[Tensor, Tensor]] = []
        sizes: list[Tensor] = []
        columns: list[int] = []
        end = 0
        for image in images:
            last = image.start + len(image.groups[b])
            parts.append((k[b, :, end : image.start], v[b, :, end : image.start]))
            sizes.append(k.new_ones(image.start - end))
            of_keys, size = means(k[b, :, image.start : last], image.groups[b])
            parts.append((of_keys, means(v[b, :, image.start : last], image.groups[b])[0]))
            sizes.append(size)
            columns += [*range(end, image.start), *(image.start + p for p in image.kept[b])]
            end = last
        parts.append((k[b, :, end:], v[b, :, end:]))
        sizes.append(k.new_ones(count - end))
        columns += range(end, count)
        key, value = (torch.cat(of, 1) for of in zip(*parts, strict=True))
        log_sizes = torch.cat(sizes).log()
        bias = torch.zeros_like(log_sizes) if len(sized) else log_sizes
        own = None if mask is None else mask[b]
        merged = slice(images[0].start, key.shape[1] - (count - end))
        fitted, heads = [], []
        for h in range(k.shape[1]):
            rows = range(h * shared, (h + 1) * shared)
            if len(sized):
                gram, ones = torch.zeros(2, dtype=q.dtype)
                for at in sized:
                    some = torch.cat([q[b, row, list(at)] for row in rows])
                    weight = len(sized[0]) / max(len(at), 1)
                    gram, ones = gram + weight * some.T @ some, ones + weight * some.sum(0)
                ridge = SIZE_RIDGE * gram.diagonal().mean()
                one = torch.linalg.inv(gram + ridge * torch.eye(len(gram), dtype=q.dtype)) @ ones
                key[h] += log_sizes[:, None] * one / scale
            heads.append([])
            exact, weights = [], []
            for row in rows:
                every = None if own is None else own[row]
                some = _with_mask(bias, None if every is None else every[:, columns])
                heads[-1].append((q[b, row], some))
                if len(queries):
                    at = list(queries)
                    seen = None if every is None else every[at]
                    exact.append(attend(q[b, row, at], k[b, h], v[b, h], scale, seen)[0])
                    few = some if some.dim() == 1 else some[at]
                    weights.append(attend(q[b, row, at], key[h], value[h], scale, few)[1])
            new = value[h]
            if len(queries):
                a = torch.cat(weights)
                lacking, a = torch.cat(exact) - a @ new, a[:, merged]
                gram = a @ a.T
                ridge = RIDGE * gram.diagonal().mean() + 1e-19
                solved = torch.linalg.inv(gram + ridge * torch.eye(len(gram), dtype=a.dtype))
                change = a.T @ (solved @ lacking)
                new = torch.cat([new[: merged.start], new[merged] + change, new[merged.stop :]])
            fitted.append(new)
        values.append(torch.stack(fitted))
        outputs.append(
            torch.stack(
                [
                    attend(query, key[h], fitted[h], scale, some)[0]
                    for h, of in enumerate(heads)
                    for query, some in of
                ]
            )
        )
    return torch.stack(outputs), torch.stack(values)


def _with_mask(bias: Tensor, mask: Tensor | None) -> Tensor:
    """What is added to the logits: the sizes' bias [K] and a mask [Q, K]."""
    if mask is None:
        return bias
    return torch.where(mask, bias, -math.inf) if mask.dtype == torch.bool else mask + bias
