"""Which blocks of a vision transformer should merge, and how much, for a number of FLOPs.

DiffRate (Chen et al., arXiv 2305.17997) learns that by gradients; here nothing is trained.
`errors_alone` merges in one block alone, to several shares of its tokens, and sees how far off the
model's outputs are then. `Measured.choose` finds the number of tokens after each block. Of all
courses with at most so many FLOPs it takes the one whose errors have the least sum. Tokens may fall
from n to m in a block. The error counted is then what that block alone makes at m, less what it
makes at n. So what merged before is not paid for again. Dynamic programming over (block, tokens,
FLOPs) finds the best course, exact on a grid of FLOPs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.perception.counts import BlockCost

# what is tried in each block: the shares of its patches that stay
SHARES = (0.9, 0.8, 0.65, 0.5, 0.35, 0.25, 0.12)
LEVELS = 48  # numbers of patches that a course may have after a block
GRID = 1000  # units of FLOPs that the unmerged model is divided into
BATCH = 8  # images in a forward
Course = list[int]  # patches after each block
Run = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Measured:
    """What merging alone in each block does to a model's outputs, and what its blocks cost.

    Attributes:
        names: of the blocks.
        costs: of the blocks.
        errors: by block, in the order of SHARES: the relative squared error of the outputs.
        patches: of an image.
        num_prefix_tokens: tokens before them, which never merge.
        around: multiply-adds of what is around the blocks.
        base: the settings that the blocks have beside their shares.
        described: the model in words, for `made_for`.
        about: how it was measured, as JSON values.
    """

    names: tuple[str, ...]
    costs: tuple[BlockCost, ...]
    errors: tuple[tuple[float, ...], ...]
    patches: int
    num_prefix_tokens: int
    around: float
    base: MaMeConfig
    described: str
    about: dict[str, Any] = field(default_factory=dict)

    def flops(self, course: Sequence[int]) -> float:
        """Multiply-adds of an image whose patches are `course` after the blocks, over those without
        merging.
        """
        return self._of(course) / self._of([self.patches] * len(self.names))

    def error(self, course: Sequence[int]) -> float:
        """The sum of errors that is reckoned for a course."""
        before = [self.patches, *course]
        curves = [self._curve(number) for number in range(len(self.names))]
        return sum(float(curve(before[i + 1]) - curve(before[i])) for i, curve in enumerate(curves))

    def choose(self, flops: float) -> Course:
        """The patches after each block of the course with the least sum of errors that takes at
        most `flops` of the unmerged model's multiply-adds.

        Raises:
            ValueError: `flops` is no share from 0 to 1, or fewer than merging can give.
        """
        check_flops(flops)
        for spared in range(len(self.names)):  # what rounding to the grid may have lost
            course = self._best(flops - spared / GRID)
            if course is not None and self.flops(course) <= flops:
                return course
        raise ValueError(
            f"flops: expected a larger share, of which this model can be merged, got {flops:g}"
        )

    def config(self, flops: float) -> MaMeConfig:
        """The settings of `choose`, by block."""
        rules: dict[str, Any] = {"*": False}
        tokens = self.patches
        for name, left in zip(self.names, self.choose(flops), strict=True):
            if left < tokens:
                rules[name] = {"keep": round(left / tokens, 4)}
            tokens = left
        return self.base.replace(layers=rules, made_for=self.described)

    def save(self, path: str | PathLike[str], flops: float, **about: Any) -> None:
        """Writes the settings for `flops` as a file that `apply_mame` takes.

        Raises ValueError as `choose`.
        """
        values = self.config(flops).to_dict(given_only=True)
        text = json.dumps({**values, "about": {**self.about, "flops": flops, **about}}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def table(self, flops: float) -> str:
        """The choice for `flops` as text, a line for each block."""
        course, before = self.choose(flops), self.patches
        width = max(map(len, self.names))
        lines = [f"{'block':<{width}}  patches   share"]
        for name, left in zip(self.names, course, strict=True):
            lines.append(f"{name:<{width}}  {left:>7}  {left / before:>6.1%}")
            before = left
        lines.append(f"{self.flops(course):.1%} of the FLOPs")
        return "\n".join(lines)

    def _of(self, course: Sequence[int]) -> float:
        before = [self.patches, *course]
        return self.around + sum(
            float(self._work(i, np.array(before[i]), np.array(before[i + 1])))
            for i in range(len(self.names))
        )

    def _work(self, number: int, n: np.ndarray, m: np.ndarray) -> np.ndarray:
        """Multiply-adds of a block from n patches to m."""
        tokens, left = n + self.num_prefix_tokens, m + self.num_prefix_tokens
        cost = self.costs[number]
        # Destinations are compared with all tokens, and a matrix of ones makes the means.
        compared = np.minimum(m, n // 2) * n * 2 * cost.width * (m < n)
        work: np.ndarray = cost.of(tokens, tokens * tokens, left) + compared  # type: ignore[arg-type]
        return work

    def _curve(self, number: int) -> Callable[[Any], Any]:
        """The error of merging in this block alone to m patches; beyond what was tried it goes on
        as it went last.
        """
        away = np.array([0.0, *(1 - share for share in SHARES)])
        found = np.maximum.accumulate([0.0, *self.errors[number]])  # more merging errs no less
        slope = (found[-1] - found[-2]) / (away[-1] - away[-2])

        def curve(m: Any) -> Any:
            gone = 1 - np.asarray(m) / self.patches
            return np.interp(gone, away, found) + np.maximum(gone - away[-1], 0) * slope

        return curve

    def _best(self, flops: float) -> Course | None:
        """The course of the least error that takes `flops` on a grid; None: none does."""
        levels = np.unique(
            np.linspace(1, self.patches, min(LEVELS, self.patches)).round().astype(int)
        )[::-1]
        whole = self._of([self.patches] * len(self.names))
        n, m = levels[:, None], levels[None]  # from, to
        possible = (m <= n) & (m >= np.ceil(n / 2))  # a source needs a destination that stays
        most = round((flops - self.around / whole) * GRID)
        if most < 0:
            return None
        # least sum of errors by patches and units of FLOPs that are spent
        total = np.full((len(levels), most + 1), np.inf)
        total[0, 0] = 0.0
        origins = []
        for number in range(len(self.names)):
            curve = self._curve(number)
            units = np.rint(self._work(number, n, m) / whole * GRID).astype(int)
            errors = curve(m) - curve(n)
            reached = np.full_like(total, np.inf)
            origin = np.zeros(total.shape, np.int16)
            for i, j in zip(*np.nonzero(possible), strict=True):
                spent = units[i, j]
                if spent > most:
                    continue
                new = total[i, : most + 1 - spent] + errors[i, j]
                old = reached[j, spent:]
                better = new < old
                old[better] = new[better]
                origin[j, spent:][better] = i
            total = reached
            origins.append((origin, units))
        if not np.isfinite(total).any():
            return None
        place, spent = np.unravel_index(int(total.argmin()), total.shape)
        course = []
        for origin, units in reversed(origins):
            course.append(int(levels[place]))
            before = origin[place, spent]
            place, spent = before, spent - units[before, place]
        return course[::-1]


@torch.no_grad()
def errors_alone(
    blocks: int,
    images: Tensor | Iterable[Tensor],
    run: Run,
    alone: Callable[[int, float], Any],
) -> tuple[tuple[float, ...], ...]:
    """The relative squared error of the model's outputs where one block alone merges: by block, in
    the order of SHARES.

    Args:
        blocks: of the model, on which no merging is.
        images: pixel values [N, 3, H, W], or batches of them.
        run: gives the model's output of a batch.
        alone: merging in the block of that number alone, which leaves that share of its patches.
    """
    found: dict[tuple[int, float], list[float]] = {}
    for batch in batches_of(images):
        whole = tensors_of(run(batch))
        for number in range(blocks):
            for share in SHARES:
                handle = alone(number, share)
                handle.install()
                handle.capture()
                try:
                    merged = outputs_of(run(batch), handle.restore, whole)
                finally:
                    handle.remove()
                found.setdefault((number, share), []).append(relative_errors(merged, whole))
    return tuple(
        tuple(float(np.mean(found[number, share])) for share in SHARES) for number in range(blocks)
    )


def check_flops(flops: Any) -> None:
    """Raises ValueError for what is no share between 0 and 1."""
    if isinstance(flops, bool) or not isinstance(flops, (int, float)) or not 0 < flops < 1:
        raise ValueError(f"flops: expected a share above 0 and below 1, got {flops!r}")


def batches_of(images: Tensor | Iterable[Tensor]) -> Iterator[Tensor]:
    """Pixel values [B, 3, H, W] as the model takes them, a few at a time."""
    for batch in images.split(BATCH) if isinstance(images, Tensor) else images:
        if len(batch):
            yield batch


def outputs_of(
    output: Any, restore: Callable[[Tensor], Tensor], whole: Sequence[Tensor]
) -> list[Tensor]:
    """The tensors of a model's output, with all tokens where `whole` has more of them."""
    found = tensors_of(output)
    return [
        restore(one) if one.shape != other.shape and one.dim() == other.dim() == 3 else one
        for one, other in zip(found, whole, strict=True)
    ]


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of a model's output: a tensor, a tuple or transformers' output class."""
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, Mapping) else output
    found = [part for part in parts if isinstance(part, Tensor)]
    if not found:
        raise TypeError(
            f"calibrate: expected a tensor or a tuple or dict of tensors, got"
            f" {type(output).__name__}; give run, which makes one of images"
        )
    return found


def relative_errors(found: Sequence[Tensor], whole: Sequence[Tensor]) -> float:
    """Squared error over squared norm, mean over the tensors."""
    return float(
        np.mean(
            [
                float((a.float() - b.float()).square().sum())
                / max(float(b.float().square().sum()), 1e-30)
                for a, b in zip(found, whole, strict=True)
            ]
        )
    )
