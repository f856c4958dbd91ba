"""Features of a merged vision transformer beside those of the unmerged one: class token, patches, a
dense head's map.

Every picture goes through alone, so that what a batch shares counts nowhere. Patches are restored
before they are compared. That is by `handle.restore` where we merge, by tracing where a rival
merges, by interpolating where the image was made smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mame_sd.perception.handle import EncoderHandle
from mame_sd.perception.known_encoders import find_encoder
from mame_sd.runs.methods import NotApplicable

from .methods import Merged, Method, Rival
from .rivals import counted, grown, on_smaller_images
from .rules import DecreasingToMe, Pool, RandomDrop, ToMe, smaller_grid

MEASURES = ("class", "patches", "patches_p5", "map")
LOW = 0.05  # quantile of patches that `patches_p5` tells


@dataclass(frozen=True)
class Smaller:
    """Images of the share `share` of their patches, merged by `fields` or (None) not at all."""

    share: float
    fields: Mapping[str, Any] | None = None

    def describe(self) -> dict[str, Any]:
        """See `Method`."""
        return {"share": self.share, **({} if self.fields is None else {"mame": dict(self.fields)})}

    @contextmanager
    def counted(
        self, model: nn.Module, grid: tuple[int, int] | None = None
    ) -> Iterator[EncoderHandle]:
        """See `Method`; `grid` (h, w) of the patches of the whole images."""
        assert grid is not None
        patch = patch_of(model)
        small = smaller_grid(grid, self.share)
        with on_smaller_images(model, (small[0] * patch, small[1] * patch)):
            merged = (
                counted(model) if self.fields is None else Merged(None, self.fields).counted(model)
            )
            with merged as handle:
                yield handle


@dataclass(frozen=True)
class Row:
    """One way to spend less.

    Attributes:
        label: for tables.
        method: makes it at a value of its knob, for a model of so many blocks.
        least, most: of the knob; FLOPs grow from one to the other.
        pictures: how many FLOPs are counted on when the knob is solved; more than one where they
            depend on the picture.
    """

    label: str
    method: Callable[[float, int], Method | Smaller]
    least: float = 0.02
    most: float = 1.0
    pictures: int = 1


def _merged(**fields: Any) -> Callable[[float, int], Method]:
    return lambda keep, depth: Merged(None, {"keep": keep, **fields})


ROWS: dict[str, Row] = {
    "default": Row("MaMe default", _merged()),
    "paper-tau": Row(
        "MaMe, the paper's form by tau",
        lambda tau, _: Merged("first", {"tau": tau}),
        -0.5,
        pictures=4,
    ),
    "tome": Row("ToMe", lambda share, depth: Rival(ToMe((1 - share) * 1000)), 0.0),
    "tome-decreasing": Row(
        "ToMe, decreasing",
        lambda share, depth: Rival(DecreasingToMe((1 - share) * 1000, depth=depth)),
    ),
    "random": Row("random dropping", lambda keep, _: Rival(RandomDrop(keep), "all")),
    "pool": Row("pooling", lambda keep, _: Rival(Pool(keep))),
    "smaller": Row("smaller image", lambda share, _: Smaller(share)),
    "smaller-merged": Row(
        "smaller image, merged",
        lambda share, _: Smaller(share, {"keep": 1 - (1 - share) / 3}),
        least=0.1,
    ),
    "constant-x": Row("MaMe, constant, tokens compared", _merged(schedule="constant", feature="x")),
}
DEFAULT_ROWS = (
    *("default", "paper-tau", "constant-x", "tome", "tome-decreasing", "random", "pool"),
    *("smaller", "smaller-merged"),
)
REFERENCE = "smaller"  # the row that differences are from


class Source(Protocol):
    """A model that gives features."""

    model: nn.Module

    def tokens(self, pixels: Tensor) -> Tensor:
        """Tokens [B, L', C] of images [B, 3, H, W]."""

    def map(self, patches: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor | None:
        """A dense head's map [B, 1, H, W] of patches [B, h w, C]; None: no head."""


@dataclass
class View:
    """Features of one picture: class token [C], patches [P, C], map [H, W]; FLOPs (multiply-adds)
    they took.
    """

    summary: Tensor
    patches: Tensor
    map: Tensor | None
    flops: float


def patch_of(model: nn.Module) -> int:
    """Side of the patches of the vision transformer in `model`, in pixels."""
    parts = [part for part in find_encoder(model)[0].modules() if isinstance(part, nn.Conv2d)]
    if not parts:
        raise NotApplicable(
            "expected a model that cuts images into patches itself, got one whose images come as"
            " patches"
        )
    return int(parts[0].kernel_size[0])


@torch.no_grad()
def view(source: Source, method: Method | Smaller, pixels: Tensor) -> View:
    """The features of one picture [1, 3, H, W] under `method`, patches at all of their places."""
    encoder, _, known = find_encoder(source.model)
    prefix, patch = known.prefix_tokens_of(encoder), patch_of(source.model)
    size = (pixels.shape[2], pixels.shape[3])
    grid = (size[0] // patch, size[1] // patch)
    small = smaller_grid(grid, method.share) if isinstance(method, Smaller) else grid
    on = (
        method.counted(source.model, grid)
        if isinstance(method, Smaller)
        else method.counted(source.model)
    )
    with on as handle:
        handle.reset()
        handle.capture()
        tokens = source.tokens(pixels)
        if handle.plans():
            tokens = handle.restore(tokens)
        flops = handle.report().flops
    tokens = tokens.float()
    mapped = source.map(tokens[:, prefix:], small, size)
    if small != grid:
        tokens = grown(tokens, prefix, grid, small)
    patches = tokens[0, prefix:]
    summary = tokens[0, 0] if prefix else patches.mean(0)
    return View(summary, patches, None if mapped is None else mapped[0, 0], flops)


def nearness(own: View, whole: View) -> dict[str, float]:
    """How near the features of a picture are to those of the unmerged model: cosines, and the map's
    correlation.
    """
    cosines = F.cosine_similarity(own.patches, whole.patches, dim=-1)
    found = {
        "class": F.cosine_similarity(own.summary, whole.summary, dim=-1).item(),
        "patches": cosines.mean().item(),
        "patches_p5": cosines.quantile(LOW).item(),
    }
    if own.map is not None and whole.map is not None:
        pair = torch.stack([own.map.flatten(), whole.map.flatten()]).double()
        found["map"] = torch.corrcoef(pair)[0, 1].item()
    return found


def same_neighbour(own: Tensor, whole: Tensor) -> Tensor:
    """bool [N]: whether the nearest other picture by cosine is the same in summaries `own` as in
    `whole`, [N, C] both.
    """

    def nearest(rows: Tensor) -> Tensor:
        rows = F.normalize(rows, dim=-1)
        return (rows @ rows.T).fill_diagonal_(-2).argmax(1)

    return nearest(own) == nearest(whole)


def flops_of(source: Source, method: Method | Smaller, pictures: Sequence[Tensor]) -> float:
    """Multiply-adds of one picture under `method`, mean over `pictures`."""
    return float(np.mean([view(source, method, pixels).flops for pixels in pictures]))


def solved(
    source: Source, row: Row, flops: float, pictures: Sequence[Tensor], halvings: int = 10
) -> float:
    """The knob of `row` whose FLOPs are nearest to `flops`, by halving its range.

    Raises:
        NotApplicable: the row can do nothing with this model.
    """
    depth = len(find_encoder(source.model)[1])
    low, high = row.least, row.most
    seen: dict[float, float] = {}
    for _ in range(halvings):
        knob = (low + high) / 2
        seen[knob] = flops_of(source, row.method(knob, depth), pictures[: row.pictures])
        low, high = (low, knob) if seen[knob] > flops else (knob, high)
    return min(seen, key=lambda knob: abs(seen[knob] - flops))
