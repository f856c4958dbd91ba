"""Compute a function of each token on a few tokens, and restore all others by a fit.

An MLP, or the change that a whole transformer block makes, is a function f of each token's input x.
`choose_tokens` chooses a share P of the tokens, f is computed on P alone, and kernel ridge
regression on the inputs gives f everywhere:

    f(x) ~ mean(f_P) + W (f_P - mean(f_P)),   W = k(x, x_P) (k(x_P, x_P) + RIDGE I)^-1
    k(a, b) = exp(-|a - b|^2 / (BANDWIDTH m)),  m = the mean of |a - b|^2 among the x_P

The result is exact on P. MaRe (arXiv 2604.13432) copies the output of a merged token instead, which
is two to ten times as far from f (docs/restoring.md). Half of P is drawn, one token of each cell of
the grid; the other half are the tokens that are farthest from these. The grid is cut into tiles of
about `TILE_SIZE` x `TILE_SIZE` tokens, so that the cost of the fit grows linearly with the number
of tokens. Where the rows divide evenly, tiles are strips of whole rows, which need no permutation.
They explain .5 % less of the variance of DINOv2's MLPs than squares do.

Every sample of a batch is restored by itself. Nothing waits for the device, and all shapes are
known before the call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mame_sd.config import checked
from mame_sd.core.cells import Cells, checked_grid
from mame_sd.core.fit import HALF_MAX, within
from mame_sd.core.groups import cached_tensors, make_cells, matmul_fp32, no_autocast

TILE_SIZE = 32  # tokens a side
BANDWIDTH = 4.0  # of the mean squared distance among the chosen tokens
RIDGE = 0.002  # the kernel is 1 on its diagonal
DRAWN = 0.5  # share of the chosen tokens that are drawn; all others are the farthest from these
LARGEST = 12.0  # sum of a token's absolute weights in half precision; a fit rarely exceeds 8
TINY = 1e-30  # a mean distance of tokens that are all alike


class Chosen(ABC):
    """Chosen tokens of an image or several, which may lie in a longer sequence.

    Attributes:
        at: LongTensor [B, n'], the positions of the chosen tokens among those of the images.
    """

    at: Tensor

    @property
    @abstractmethod
    def tokens_in(self) -> int:
        """Return the number of tokens of the images."""

    @property
    def tokens_kept(self) -> int:
        """Return the number of chosen tokens."""
        return self.at.shape[1]

    @abstractmethod
    def take(self, t: Tensor) -> Tensor:
        """Return the chosen tokens [B, n', C] of t [B, L, C]."""

    @abstractmethod
    def restore(self, f: Tensor) -> Tensor:
        """Return all tokens [B, L, C], restored from f [B, n', C] of the chosen ones."""

    def add_restored_(self, y: Tensor, f: Tensor) -> None:
        """Add `restore(f)` to y [B, L, C] in place."""
        y.add_(self.restore(f))

    def take_around(self, t: Tensor, before: int) -> Tensor:
        """Return the chosen tokens and those around the images, [B, n', C], of t [B, n, C].

        The images' tokens begin at position `before`.
        """
        if t.shape[1] == self.tokens_in:
            return self.take(t)
        end = before + self.tokens_in
        return torch.cat([t[:, :before], self.take(t[:, before:end]), t[:, end:]], 1)

    def restore_around(self, f: Tensor, before: int) -> Tensor:
        """Return all tokens [B, n, C], restored from f [B, n', C] in the order of `take_around`."""
        if f.shape[1] == self.tokens_kept:
            return self.restore(f)
        first, images, last = self._around(f, before)
        return torch.cat([first, self.restore(images), last], 1)

    def add_restored_around_(self, y: Tensor, f: Tensor, before: int) -> Tensor:
        """Add `restore_around(f, before)` to y [B, n, C] in place, and return y."""
        first, images, last = self._around(f, before)
        end = before + self.tokens_in
        y[:, :before].add_(first)
        y[:, end:].add_(last)
        self.add_restored_(y[:, before:end], images)
        return y

    def _around(self, f: Tensor, before: int) -> tuple[Tensor, ...]:
        """Cut f [B, n', C] into the tokens before the images, the chosen ones, and the others."""
        kept = self.tokens_kept
        return f.split([before, kept, f.shape[1] - before - kept], 1)


@dataclass(frozen=True, eq=False)
class ChosenTokens(Chosen):
    """The chosen tokens of each sample, and the kernel that restores all tokens from them.

    Attributes:
        cells: the tiles of the grid.
        at: LongTensor [B, T * K], the position in row-major order of each of the K chosen tokens of
            T tiles.
        slots: LongTensor [B * T, K], their places among the P slots of their tile.
        kernel: k(x, x_P) of all slots and the chosen tokens, [B * T, P, K], in fp32 (fp64).
        factor: inverse [B * T, K, K] of the Cholesky factor of k(x_P, x_P) + RIDGE I.
        on_error: called by `restore` with its `left_out_error`. If None, `restore` estimates none.
    """

    cells: Cells
    at: Tensor
    slots: Tensor
    kernel: Tensor
    factor: Tensor
    on_error: Callable[[Tensor, Tensor], None] | None = None

    @property
    def tokens_in(self) -> int:
        """Return the number of tokens of the grid."""
        return self.cells.tokens

    def take(self, t: Tensor) -> Tensor:
        """Return the chosen tokens [B, T * K, C] of t [B, L, C]."""
        return t.gather(1, self.at.unsqueeze(-1).expand(-1, -1, t.shape[-1]))

    def restore(self, f: Tensor) -> Tensor:
        """Return all tokens [B, L, C], restored from f [B, T * K, C] of the chosen ones.

        Where f changes faster than the chosen tokens tell, a fit may overshoot several times. So in
        fp32 and wider, results are limited to the range of each tile's f by channel, extended by a
        quarter on either side. In half precision the weights are limited (`weights`), which reads
        and writes far less. Gradients reach f; the kernel is a constant.
        """
        y = self._fitted(self._by_tile(f))
        return self.cells.from_slots(y.view(f.shape[0], self.cells.order.numel(), f.shape[-1]))

    def _by_tile(self, f: Tensor) -> Tensor:
        """Return f [B, T * K, C] by tile, [B * T, K, C], and give its errors to `on_error`."""
        parts = f.reshape(*self.slots.shape, f.shape[-1])
        if self.on_error is not None:
            self.on_error(*self.left_out_error(parts))
        return parts

    def _fitted(self, parts: Tensor) -> Tensor:
        """Return the fit [B * T, P, C] of f, which is `parts` [B * T, K, C] on the chosen tokens.

        The result has the dtype of f, and is exact on the chosen tokens.
        """
        with no_autocast(parts):
            if parts.dtype.itemsize < 4:  # the coefficients of f need more bits than 16
                y = torch.bmm(self.weights(parts.dtype), parts)
                halves = parts.dtype == torch.float16
                return y.clamp_(-HALF_MAX, HALF_MAX) if halves else y
            dtype = torch.promote_types(parts.dtype, self.kernel.dtype)
            kernel, factor, wide = (t.to(dtype) for t in (self.kernel, self.factor, parts))
            mean = wide.mean(1, keepdim=True)
            y = torch.baddbmm(mean, kernel, _solved(factor, wide - mean))
            y = within(y.to(parts.dtype), parts)
        return y.scatter_(1, self.slots.unsqueeze(-1).expand_as(parts), parts)

    def weights(self, dtype: torch.dtype) -> Tensor:
        """Return how much each chosen token counts for each slot, [B * T, P, K].

        Rows sum to 1. The row of a chosen token is one at its own place and zero elsewhere. Other
        rows are limited, so that no result is farther from the mean of f than LARGEST times the
        largest deviation of f.

        Args:
            dtype: dtype of the weights.
        """
        with torch.no_grad(), no_autocast(self.kernel):  # torch.compile can't follow a decorator
            half = torch.bmm(self.kernel, self.factor.transpose(1, 2))
            # Less their mean, the weights of a token apply to f less its mean.
            count = self.factor.shape[1]
            weights = torch.bmm(half, self.factor - self.factor.mean(-1, keepdim=True))
            sums = torch.linalg.vector_norm(weights, 1, -1, keepdim=True)
            mean = cached_tensors(_constant, 1 / count, weights.dtype, weights.device)
            weights = torch.addcdiv(mean, weights, sums.clamp_min_(LARGEST), value=LARGEST)
            weights = weights.to(dtype)
            eye = cached_tensors(_eye, count, dtype, weights.device)
            rows = self.slots.unsqueeze(-1).expand_as(self.factor)
            return weights.scatter_(1, rows, eye.expand_as(self.factor))

    @torch.no_grad()
    def left_out_error(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """Estimate how far restored tokens are from computed ones.

        Each chosen token is restored from all others (the leave-one-out error of ridge regression,
        PRESS; Allen 1974). No further fit is needed: the error of token i is
        [G^-1 y]_i / [G^-1]_ii, where G is the kernel with its ridge, and y is f less its mean over
        all chosen tokens.

        Args:
            parts: f of the chosen tokens by tile, [B * T, K, C].

        Returns:
            The sum of the squared errors, and that of the squared deviations of f from its mean in
            each tile. The root of their ratio is the relative error.
        """
        with no_autocast(parts):
            y = parts.to(self.factor.dtype)
            y = y - y.mean(1, keepdim=True)
            errors = _solved(self.factor, y) / self.factor.square().sum(1).unsqueeze(-1)
            return errors.square().sum(), y.square().sum()

    def add_restored_(self, y: Tensor, f: Tensor) -> None:
        """See `Chosen`. In bf16 the product of the fit adds to y itself, which saves two passes."""
        if y.dtype != torch.bfloat16 or not self.cells.in_order or torch.compiler.is_compiling():
            super().add_restored_(y, f)
            return
        parts, weights, tiles = self._by_tile(f), self.weights(y.dtype), self.cells.tiles
        for sample in range(len(y)):  # autograd refuses to change the views of `unbind` in place
            rows = slice(sample * tiles, (sample + 1) * tiles)
            y[sample].unflatten(0, (tiles, -1)).baddbmm_(weights[rows], parts[rows])


class ChosenOfImages(Chosen):
    """The chosen tokens of images that follow one another in a sequence.

    Args:
        images: the chosen tokens of each image.
    """

    def __init__(self, images: Sequence[ChosenTokens]) -> None:
        self.images, start, at = images, 0, []
        for image in images:
            at.append(image.at + start)
            start += image.tokens_in
        self.at = torch.cat(at, 1)

    @property
    def tokens_in(self) -> int:
        """Return the number of tokens of all images."""
        return sum(image.tokens_in for image in self.images)

    def take(self, t: Tensor) -> Tensor:
        """See `Chosen`."""
        parts = t.split([image.tokens_in for image in self.images], 1)
        return torch.cat([one.take(part) for one, part in zip(self.images, parts, strict=True)], 1)

    def restore(self, f: Tensor) -> Tensor:
        """See `Chosen`."""
        parts = f.split([image.tokens_kept for image in self.images], 1)
        restored = [one.restore(part) for one, part in zip(self.images, parts, strict=True)]
        return torch.cat(restored, 1)

    def add_restored_(self, y: Tensor, f: Tensor) -> None:
        """See `Chosen`."""
        start = at = 0
        for one in self.images:
            end, last = start + one.tokens_in, at + one.tokens_kept
            one.add_restored_(y[:, start:end], f[:, at:last])
            start, at = end, last


@torch.no_grad()
def choose_tokens(
    x: Tensor,
    cells: Cells,
    count: int,
    draw: Tensor | None = None,
    leader: Tensor | None = None,
    on_error: Callable[[Tensor, Tensor], None] | None = None,
) -> ChosenTokens:
    """Choose tokens by their inputs, and fit the weights that restore all others.

    The choice and the weights have no gradient. Distances, the kernel and its factor are computed
    in fp32 (fp64 for fp64), by Cholesky.

    Args:
        x: the inputs [B, L, C] of the tokens of the grid, in row-major order.
        cells: the tiles, and the cells of which one token each is drawn.
        count: K, the chosen tokens of each tile; more than `cells.m` and at most the tile's tokens.
        draw: LongTensor [1], the index of the draw. If None, the first draw.
        leader: LongTensor [B], for each sample the index of the sample whose tokens decide for it;
            for an unguided sample, that of the guided one. If None, each sample decides for itself.
        on_error: see `ChosenTokens`.

    Returns:
        The chosen tokens, and the kernel that restores all others from them.
    """
    with no_autocast(x):
        slots, apart = choose_slots(x, cells, count, draw, leader)
        kernel, factor = _kernel(apart, slots)
    return ChosenTokens(cells, positions(cells, slots), slots, kernel, factor, on_error)


@torch.no_grad()
def choose_slots(
    x: Tensor, cells: Cells, count: int, draw: Tensor | None = None, leader: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose tokens, and measure how far all others are from them.

    Args:
        x: the inputs [B, L, C] of the tokens of the grid, in row-major order.
        cells: the tiles, and the cells of which one token each is drawn.
        count: K, the chosen tokens of each tile.
        draw: see `choose_tokens`.
        leader: see `choose_tokens`.

    Returns:
        The slots of the chosen tokens in their tile, LongTensor [B * T, K], and the squared
        distances [B * T, P, K] of the tile's tokens to them, in fp32 (fp64 for fp64).
    """
    tiles, width, cell_count = cells.tiles, cells.width, cells.m
    batch, channels = x.shape[0], x.shape[2]
    dtype = torch.promote_types(x.dtype, torch.float32)
    drawn = cells.places[0] if draw is None else cells.places.index_select(0, draw)
    drawn = drawn.view(1, tiles, cell_count).expand(batch, -1, -1).reshape(-1, cell_count)
    slots = cells.to_slots(x).reshape(batch * tiles, width, channels)

    def taken(at: Tensor) -> Tensor:
        return slots.gather(1, at.unsqueeze(-1).expand(-1, -1, channels))

    # Subtract the first token of each tile: a large common part would hide small distances.
    origin = taken(drawn[:, :1])
    if x.dtype != torch.float16:
        slots = slots - origin
    else:  # a difference may leave the range: halve it, as scaling x doesn't change the kernel
        slots = torch.add(origin * -0.5, slots, alpha=0.5)
    squares = torch.linalg.vector_norm(slots, dim=-1, dtype=dtype).square_()  # [B * T, P]
    # |x - p|^2 / 2 = |x|^2 / 2 + (|p|^2 / 2 - x . p)
    halves = squares.gather(1, drawn).unsqueeze(1)
    dots = matmul_fp32(slots, taken(drawn).transpose(1, 2))
    nearest = torch.add(halves, dots, alpha=-2).amin(-1).add_(squares)
    if cells.pad is not None:  # choose padding last, but never a drawn token again
        pad = cells.pad.view(tiles, width).expand(batch, -1, -1).reshape(nearest.shape)
        nearest.masked_fill_(pad, -torch.finfo(dtype).max)
    nearest.scatter_(1, drawn, -torch.inf)
    farthest = nearest.topk(count - cell_count, sorted=False).indices
    if leader is not None and len(leader) == batch > 1:
        farthest = farthest.view(batch, tiles, -1).index_select(0, leader).flatten(0, 1)
    others = matmul_fp32(slots, taken(farthest).transpose(1, 2))
    chosen = torch.cat([drawn, farthest], 1)
    apart = squares.unsqueeze(2) + squares.gather(1, chosen).unsqueeze(1)
    apart[..., :cell_count].sub_(dots, alpha=2)
    apart[..., cell_count:].sub_(others, alpha=2)
    return chosen, apart.clamp_min_(0)


def positions(cells: Cells, slots: Tensor) -> Tensor:
    """Return the positions [B, T * K] in the grid of `slots` [B * T, K], which count by tile."""
    at = slots
    if cells.tiles > 1:
        starts = cached_tensors(_starts, cells.tiles, cells.width, slots.device)
        at = (slots.view(-1, cells.tiles, slots.shape[1]) + starts).flatten(1)
    return at if cells.in_order else cells.order[at]


def _kernel(apart: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the kernel of the fit, and factor its matrix of the chosen tokens.

    Args:
        apart: squared distances [B * T, P, K] to the chosen tokens, which are overwritten.
        chosen: LongTensor [B * T, K], the slots of the chosen tokens.

    Returns:
        The kernel [B * T, P, K], and the inverse [B * T, K, K] of the Cholesky factor.
    """
    count = chosen.shape[1]
    rows = chosen.unsqueeze(-1).expand(-1, -1, count)
    mean = apart.gather(1, rows).mean((1, 2), keepdim=True)
    kernel = apart.div_(torch.rsub(mean, -BANDWIDTH * TINY, alpha=BANDWIDTH)).exp_()
    gram = kernel.gather(1, rows)
    gram.diagonal(dim1=1, dim2=2).add_(RIDGE)
    factor = torch.linalg.cholesky_ex(gram)[0]
    eye = cached_tensors(_eye, count, gram.dtype, gram.device).expand_as(gram)
    return kernel, torch.linalg.solve_triangular(factor, eye, upper=False)


def _solved(factor: Tensor, y: Tensor) -> Tensor:
    """Return G^-1 y, where `factor` is the inverse of the Cholesky factor of G."""
    # Multiply twice: the inverse of the whole matrix would lose 4 of fp32's 24 bits.
    return torch.bmm(factor.transpose(1, 2), torch.bmm(factor, y))


def _eye(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(count, dtype=dtype, device=device)


def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def _starts(tiles: int, width: int, device: torch.device) -> Tensor:
    """Return the slot with which each tile begins, a LongTensor [T, 1]."""
    return torch.arange(tiles, device=device).unsqueeze(1) * width


def cells_and_count(
    size: tuple[int, ...], keep: float, seed: int, device: torch.device, tile_size: int = TILE_SIZE
) -> tuple[Cells, int]:
    """Return the tiles of a grid, and how many tokens of each tile to choose for a share `keep`.

    Args:
        size: (h, w) of an image's tokens, (t, h, w) of a video's, or (n,) of a sequence.
        keep: share of the tokens to choose, above 0 and below 1.
        seed: seed of the draws.
        device: device of the tables.
        tile_size: side of a tile in tokens. If 0, the whole grid is one tile.
    """
    cells = make_cells(size, DRAWN * keep, tile_size, seed, device, strips=True)
    return cells, min(max(cells.m + 1, round(keep * cells.width)), cells.width)


def restored(
    fn: Callable[[Tensor], Tensor],
    x: Tensor,
    grid: Sequence[int],
    keep: float = 0.125,
    before: int = 0,
    after: int = 0,
    draw: Tensor | None = None,
    seed: int = 0,
    tile_size: int = TILE_SIZE,
) -> Tensor:
    """Compute `fn` on a share of an image's tokens, and restore all others by a fit.

    `fn` must treat each token by itself, as an MLP does. It is called once.

        hidden_states = hidden_states + restored(block.ff, norm(hidden_states), grid=(64, 64))

    Args:
        fn: a function of tokens [B, n, C] that returns [B, n, C'], for any n.
        x: the tokens [B, before + L + after, C], L = prod(grid).
        grid: (h, w) of the image's tokens in row-major order, or (t, h, w) of a video's.
        keep: share of the image's tokens that `fn` is computed on, above 0 to 1; 1 computes all.
        before: number of other tokens, such as text, before the image's. `fn` is computed on all of
            them.
        after: number of other tokens after the image's.
        draw: LongTensor [1] below 64, the index of the draw (`guidance.partition_index`). Give each
            layer and step another one. If None, the first draw.
        seed: seed of the draws, which have their own generator.
        tile_size: side of the tiles within which tokens are restored. If 0, the whole grid is one
            tile.

    Returns:
        [B, before + L + after, C'] in the dtype of `fn`'s output, exact for the chosen tokens and
        for those around the image. Gradients reach `fn` through the chosen tokens; the choice and
        the weights of the fit are constants.

    Raises:
        ValueError: shapes that don't go together, or a number out of its range.
    """
    size = checked_grid(grid, before, after)
    if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 < keep <= 1:
        raise ValueError(f"keep: expected a share above 0 and at most 1, got {keep!r}")
    tokens = torch.Size(size).numel()
    is_tokens = isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point()
    if not is_tokens or x.shape[1] != before + tokens + after:
        got = f"{list(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else repr(x)
        raise ValueError(
            f"x: expected floating-point tokens [B, {before + tokens + after}, C], got {got}"
        )
    if draw is not None and not (
        isinstance(draw, Tensor) and draw.shape == (1,) and draw.dtype == torch.long
    ):
        raise ValueError(f"draw: expected a LongTensor [1], got {draw!r}")
    if not torch.compiler.is_compiling():  # a graph was called without one before
        checked("tile_size", tile_size)
        checked("seed", seed)

    def computed(t: Tensor) -> Tensor:
        y = fn(t)
        if not isinstance(y, Tensor) or y.dim() != 3 or y.shape[:2] != t.shape[:2]:
            got = list(y.shape) if isinstance(y, Tensor) else repr(y)
            batch, count = t.shape[:2]
            raise ValueError(f"fn: expected [{batch}, {count}, C] for {count} tokens, got {got}")
        return y

    if keep == 1 or tokens < 2:
        return computed(x)
    cells, count = cells_and_count(size, keep, seed, x.device, tile_size)
    chosen = choose_tokens(x[:, before : before + tokens], cells, count, draw)
    return restored_by(chosen, computed, x, before)


def restored_by(
    chosen: Chosen, fn: Callable[[Tensor], Tensor], x: Tensor, before: int = 0
) -> Tensor:
    """Compute `fn` on the chosen tokens and on those around the images, and restore the images'.

    `chosen` are the images' chosen tokens. All other arguments are those of `restored`.
    """
    return chosen.restore_around(fn(chosen.take_around(x, before)), before)
