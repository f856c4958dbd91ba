"""MaMe and MaRe as slow, plain float64 loops: what every fast path is tested against, outputs and
gradients.

Three forms of the same method stand side by side:

* `algorithm_1` and `algorithm_2` follow the paper's pseudo-code line by line, for one sample and a
  fixed tau. Its last line `W / Mask` is included: columns then sum to more than 1, and nothing
  outside this file uses it.
* `paper_column` follows the paper's equations, as `variant="paper"` does.
* `settled_column` is our default: exact columns, and refining that never empties a column.

Everything is differentiable. One source, or one destination, is computed at a time.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.detail import GROUPS, RANK, RIDGE, Detail, directions
from mame_sd.core.partition import positions

REFINE_FLOOR = 1e-5


@dataclass(eq=False)
class ReferencePlan:
    """The loop version of `MergePlan`, for x [B, L, d] (special tokens included)."""

    weights: Tensor  # [B, M, N] W^F, rows and columns in the order of dst and src
    preserved: list[
        list[int]
    ]  # for each sample, the preserved sources as indices into src, ascending
    dst: list[int]  # positions, special tokens not counted
    src: list[int]
    special: int
    paper: bool

    @property
    def counts(self) -> Tensor:
        """R_i = 1 + sum_j W^F_ij [B, M]"""
        return 1 + self.weights.sum(2)

    def merge(self, t: Tensor) -> Tensor:
        """[B, L, C] to [B, L', C]: special tokens, x''_dst, preserved sources."""
        out = []
        for b, sample in enumerate(t.double()):
            rows, image = [sample[s] for s in range(self.special)], sample[self.special :]
            merged = [j for j in range(len(self.src)) if j not in self.preserved[b]]
            sources = image[[self.src[j] for j in merged]]
            for i, p in enumerate(self.dst):
                fused = image[p] + (self.weights[b, i, merged, None] * sources).sum(0)
                rows.append(fused / self.counts[b, i])
            rows += [sample[self.special + self.src[j]] for j in self.preserved[b]]
            out.append(torch.stack(rows))
        return torch.stack(out)

    def restore(self, y: Tensor, detail: Detail | None = None) -> Tensor:
        """[B, L', C] to [B, L, C], every token at its original position."""
        out = []
        for b, sample in enumerate(y.double()):
            rows: dict[int, Tensor] = {s: sample[s] for s in range(self.special)}
            for i, p in enumerate(self.dst):
                divisor = self.counts[b, i] if self.paper else 1.0
                rows[self.special + p] = sample[self.special + i] / divisor
            dst = torch.stack([rows[self.special + p] for p in self.dst])
            for j, q in enumerate(self.src):
                if j in self.preserved[b]:
                    row = self.special + len(self.dst) + self.preserved[b].index(j)
                    rows[self.special + q] = sample[row]
                else:
                    rows[self.special + q] = (self.weights[b, :, j, None] * dst).sum(0)
            out.append(torch.stack([rows[p] for p in range(len(rows))]))
        restored = torch.stack(out)
        if detail is None:
            return restored
        return torch.stack(
            [self._restored_with_detail(b, x, detail) for b, x in enumerate(restored)]
        )

    def _restored_with_detail(self, b: int, x: Tensor, detail: Detail) -> Tensor:
        """Copies x [L, C] of sample b, the detail that their blur has, and that which follows the
        input.
        """
        feature, plane = detail.feature, detail.plane
        groups = self._groups(b)
        varying, unexplained = self._beyond_blur(x, groups, plane)
        x = x + varying
        count = min(RANK, (self.special + len(self.dst)) // GROUPS)
        if not count:
            return x
        seen = (
            feature[b].double() @ directions(feature.shape[2], count, torch.device("cpu")).double()
        )
        seen = torch.cat([seen.new_zeros(self.special, count), seen])
        middles = seen.clone()
        for group in groups:
            middles[group] = seen[group].mean(0)
        varying, between = self._beyond_blur(middles, groups, plane)
        within = seen - middles - varying
        share = torch.tensor([len(group) / len(x) for group in groups], dtype=x.dtype)
        covariance = sum(s * torch.outer(g, g) for s, g in zip(share, between, strict=True))
        follows = sum(
            s * torch.outer(g, u) for s, g, u in zip(share, between, unexplained, strict=True)
        )
        ridge = RIDGE * covariance.trace() / count + torch.finfo(x.dtype).tiny ** 0.5
        slope = torch.linalg.solve(covariance + ridge * torch.eye(count, dtype=x.dtype), follows)
        power = sum(s * (u * u).sum() for s, u in zip(share, unexplained, strict=True))
        explained = (slope * follows).sum() / power.clamp(min=torch.finfo(x.dtype).tiny)
        return x + within @ slope * explained.clamp(0, 1) ** 2

    def _groups(self, b: int) -> list[list[int]]:
        """The tokens of each of those that `merge` gives, in its order."""
        groups = [[s] for s in range(self.special)]
        for i, p in enumerate(self.dst):
            merged = [
                q
                for j, q in enumerate(self.src)
                if j not in self.preserved[b] and self.weights[b, i, j] > 0
            ]
            groups.append([self.special + q for q in (p, *merged)])
        return groups + [[self.special + self.src[j]] for j in self.preserved[b]]

    def _beyond_blur(
        self, x: Tensor, groups: list[list[int]], plane: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Of copies x [L, C] how their blur varies around its mean in each group [L, C]. Also what
        of each group's is not that mean [L', C].
        """
        h, w = plane
        blur = [x[s] for s in range(self.special)]
        for p in range(h * w):
            around = torch.zeros_like(x[0])
            for dy, dx in itertools.product((-1, 0, 1), repeat=2):
                y, z = min(max(p // w + dy, 0), h - 1), min(max(p % w + dx, 0), w - 1)
                around = around + (2 - abs(dy)) * (2 - abs(dx)) / 16 * x[self.special + y * w + z]
            blur.append(around)
        varying, unexplained = list(x), []
        for group in groups:
            middle = sum((blur[q] for q in group), torch.zeros_like(x[0])) / len(group)
            unexplained.append(x[group[0]] - middle)
            for q in group:
                varying[q] = blur[q] - middle
        return torch.stack(varying), torch.stack(unexplained)


def reference_plan(
    x: Tensor,
    config: MaMeConfig,
    size: tuple[int, int] | None = None,
    special: int = 0,
    draw: Tensor | None = None,
    leader: Tensor | None = None,
) -> ReferencePlan:
    """The loop version of `plan_merge`, for x [B, L, d]."""
    x = x.double()[:, special:]
    x = x if leader is None else torch.stack([x[i] for i in leader.tolist()])
    pos = positions(x.shape[1], config, size, draw=draw)
    dst, src = pos.dst.tolist(), pos.src.tolist()
    tile = _tile_of(x.shape[1], config, size)
    weights, preserved = [], []
    for sample in x:
        s = similarity(sample, dst, src, tile, config.metric)
        if config.keep is None:
            assert config.tau is not None
            columns = [_column(s[j], config.tau, config) for j in range(len(src))]
            out = {j for j, column in enumerate(columns) if not bool(column.sum() > 0)}
        else:
            kept = max(len(dst), round(config.keep * x.shape[1]))
            columns, out = _by_rank(s, x.shape[1] - kept, config)
        weights.append(columns)
        preserved.append(out)
    if config.batch == "shared":
        anywhere = set().union(*preserved)
        preserved = [anywhere for _ in preserved]
    for columns, out in zip(weights, preserved, strict=True):
        for j in range(len(src)) if config.weights == "pick" else out:
            columns[j] = torch.zeros_like(columns[j])
    stacked = [
        torch.stack(columns, 1) if columns else x.new_zeros(len(dst), 0) for columns in weights
    ]
    lost = [sorted(out) for out in preserved]
    return ReferencePlan(torch.stack(stacked), lost, dst, src, special, config.variant == "paper")


def similarity(
    x: Tensor, dst: list[int], src: list[int], tile: list[int], metric: str
) -> list[Tensor]:
    """For each source of x [L, d] its column of S [M]; -inf where the destination is in another
    tile.
    """
    to, scale = x[dst], math.sqrt(x.shape[1])
    columns = []
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
        elsewhere = torch.tensor([tile[p] != tile[q] for p in dst])
        column = column.masked_fill(elsewhere, -math.inf)
        columns.append(torch.softmax(column, 0) if metric == "softmax" else column)
    return columns


def settled_column(s: Tensor, refine: bool) -> Tensor:
    """W^F of one source from its column of S~ [M]: sums to 1, or is all 0 when S~ is."""
    if not bool((s > 0).any()):
        return torch.zeros_like(s)
    w = s / s.sum()
    if not refine:
        return w
    zeta = w.sum() / (w > 0).sum()
    refined = (w - zeta).relu()
    if bool(refined.sum() <= REFINE_FLOOR):
        return w
    return refined / refined.sum()


def paper_column(s: Tensor, refine: bool, eps: float) -> Tensor:
    """W^F of one source from its column of S~ [M], by the equations, C_j as Algorithm 1 counts
    it.
    """
    w = s / (s.sum() + eps)
    if not refine:
        return w
    zeta = w.sum() / ((w > 0).sum().to(w.dtype) + eps)
    pruned = (w - zeta).relu()
    return pruned / (pruned.sum() + eps)


def algorithm_1(
    x: Tensor, tau: float, dst: list[int], src: list[int], eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 1 as printed, for x [L, d] without special tokens: X' [L', d], W^F [M, N] and Mask
    [N].
    """
    x = x.double()
    m, n = len(dst), len(src)
    s = similarity(x, dst, src, [0] * len(x), "cosine")
    mask = x.new_zeros(n)
    final = x.new_zeros(m, n)
    for j in range(n):
        excess = [(s[j][i] - tau).relu() for i in range(m)]
        total = sum(excess, x.new_zeros(()))
        w = [excess[i] / (total + eps) for i in range(m)]
        count = sum(int(w[i] > 0) for i in range(m))
        zeta = sum(w, x.new_zeros(())) / (count + eps)
        pruned = [(w[i] - zeta).relu() for i in range(m)]
        mask[j] = sum(pruned, x.new_zeros(()))
        for i in range(m):
            final[i, j] = w[i] / (mask[j] + eps)
    rows = []
    for i in range(m):
        fused = x[dst[i]] + sum((final[i, j] * x[src[j]] for j in range(n)), torch.zeros_like(x[0]))
        rows.append(fused / (1 + final[i].sum()))
    rows += [x[src[j]] for j in range(n) if mask[j] == 0]
    return torch.stack(rows), final, mask


def algorithm_2(y: Tensor, final: Tensor, mask: Tensor, dst: list[int], src: list[int]) -> Tensor:
    """Algorithm 2 as printed, for y [L', C] without special tokens, to the original positions [L,
    C].

    `mask` is Algorithm 1's: a source is preserved where it is 0 (Algorithm 2 writes that condition
    the other way round).
    """
    m, n = len(dst), len(src)
    rows: dict[int, Tensor] = {}
    for i in range(m):
        rows[dst[i]] = y[i] / (final[i].sum() + 1)
    preserved = iter(range(m, len(y)))
    for j in range(n):
        if mask[j] == 0:
            rows[src[j]] = y[next(preserved)]
        else:
            rows[src[j]] = sum(
                (final[i, j] * rows[dst[i]] for i in range(m)), torch.zeros_like(y[0])
            )
    return torch.stack([rows[p] for p in range(m + n)])


def best_column(s: Tensor) -> Tensor:
    """W^F of one source from its column of S [M]: all to the most similar destination, the first of
    equals.
    """
    return torch.nn.functional.one_hot(s.argmax(), len(s)).to(s.dtype)


def _column(s: Tensor, tau: float | Tensor, config: MaMeConfig) -> Tensor:
    excess = (s - tau).relu()
    if config.weights in ("best", "pick"):  # what is picked drops the sources that would merge
        return best_column(s) if bool((s > tau).any()) else torch.zeros_like(s)
    if config.variant == "paper":
        return paper_column(excess, config.refine, config.eps)
    return settled_column(excess, config.refine)


def _by_rank(s: list[Tensor], merged: int, config: MaMeConfig) -> tuple[list[Tensor], set[int]]:
    """Columns of W^F and the preserved sources when `merged` sources are to merge: those most
    similar to any.
    """
    best = [float(column.detach().max()) for column in s]
    order = sorted(range(len(s)), key=lambda j: (-best[j], j))
    columns = [torch.zeros_like(column) for column in s]
    if merged == 0:
        return columns, set(order)
    tau = s[order[merged - 1]].max()
    for j in order[:merged]:
        if bool((s[j] > tau).any()):
            columns[j] = _column(s[j], tau, config)
        else:
            columns[j] = best_column(s[j])
    return columns, set(order[merged:])


def _tile_of(tokens: int, config: MaMeConfig, size: tuple[int, int] | None) -> list[int]:
    """The tile of each position; one for all without tiles."""
    if not config.tiles:
        return [0] * tokens
    side = math.isqrt(tokens)
    h, w = size if size is not None else (side, side)
    tile_side = config.tiles
    across = math.ceil(w / tile_side)
    return [(p // w) // tile_side * across + (p % w) // tile_side for p in range(h * w)]
