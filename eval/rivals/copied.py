"""Copy the nearest token instead of restoring by a fit: a rival.

MLPs and blocks are computed on the same tokens, and each other token is a copy of the nearest of
them, as in token merging (ToMe, arXiv 2210.09461; MaRe).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.cells import Cells
from mame_sd.core.groups import no_autocast
from mame_sd.core.restore import Chosen, ChosenTokens, choose_slots, positions
from mame_sd.diffusion.restoring import RestoreHook
from mame_sd.errors import UserError
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.merging import InstalledMethod, Merging, NotApplicable

Size = tuple[int, ...]


@dataclass(frozen=True)
class Copied:
    """Merging with `config`, where restored tokens are copies.

    Attributes:
        frames: if True, the tokens of every second frame of a video are computed, and those of
            each following frame are their copies. If False, tokens are copies of the nearest
            computed one.
    """

    config: MaMeConfig
    frames: bool = False

    def describe(self) -> dict[str, Any]:
        """Return its settings as JSON values."""
        return {
            "rival": {
                "name": "copied frames" if self.frames else "copied",
                **self.config.to_dict(given_only=True),
            }
        }

    def install(self, model: LoadedModel) -> InstalledMethod:
        """Put it on a model. Raise NotApplicable if nothing is restored in it."""
        try:
            installed = Merging(self.config).install(model)
        except UserError as error:
            raise NotApplicable(f"copied: {error}") from error
        if not installed.handle.restored:
            installed.remove()
            raise NotApplicable("copied: expected MLPs or blocks that can be restored, found none")
        for _, hook in installed.handle.restored:
            choose = _second_frames if self.frames else _nearest
            hook.choose = partial(choose, hook)  # type: ignore[method-assign]
        return installed


class _Copied(ChosenTokens):
    add_restored_ = Chosen.add_restored_  # there is no fit whose product could add in place


@dataclass(frozen=True, eq=False)
class CopiedTokens(_Copied):
    """Chosen tokens that are copied to all others.

    Attributes:
        nearest: LongTensor [B * T, P], the chosen token that is nearest to each slot.
    """

    nearest: Tensor = field(kw_only=True)

    def _fitted(self, parts: Tensor) -> Tensor:
        return parts.gather(1, self.nearest.unsqueeze(-1).expand(-1, -1, parts.shape[-1]))


@torch.no_grad()
def choose_copied(
    x: Tensor, cells: Cells, count: int, draw: Tensor | None = None, leader: Tensor | None = None
) -> CopiedTokens:
    """Choose the tokens that `choose_tokens` chooses for these arguments, without its fit."""
    with no_autocast(x):
        slots, apart = choose_slots(x, cells, count, draw, leader)
    at, unused = positions(cells, slots), apart.new_empty(0)
    return CopiedTokens(cells, at, slots, unused, unused, nearest=apart.argmin(-1))


def _nearest(hook: RestoreHook, x: Tensor, config: MaMeConfig, size: Size) -> CopiedTokens:
    """Choose tokens in place of `RestoreHook.choose`."""
    return choose_copied(x, *hook.choice(x, config, size))


@dataclass(frozen=True, eq=False)
class CopiedFrames(_Copied):
    """Copy the tokens of every second frame to the frame that follows.

    Attributes:
        size: (t, h, w) of the video's tokens.
    """

    size: tuple[int, ...] = field(kw_only=True)

    def restore(self, f: Tensor) -> Tensor:
        """Return all tokens [B, L, C], copied from f [B, n, C] of every second frame."""
        frames = f.unflatten(1, (-1, self.size[1] * self.size[2])).repeat_interleave(2, 1)
        return frames[:, : self.size[0]].flatten(1, 2)


def _second_frames(hook: RestoreHook, x: Tensor, config: MaMeConfig, size: Size) -> CopiedFrames:
    """Choose every second frame in place of `RestoreHook.choose`."""
    if len(size) != 3:
        raise NotApplicable("copied frames: expected a video, got an image")
    cells, *_ = hook.choice(x, config, size)
    every = torch.arange(math.prod(size), device=x.device).unflatten(0, (size[0], -1))
    at = every[::2].flatten().expand(len(x), -1)
    unused = x.new_empty(0)
    return CopiedFrames(cells, at, at, unused, unused, size=size)
