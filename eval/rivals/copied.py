"""Copy the nearest token instead of restoring by a fit: a rival.

MLPs and blocks are computed on the same tokens, and each other token is a copy of the nearest of
them, as in token merging (ToMe, arXiv 2210.09461; MaRe).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mame_sd.config import MaMeConfig
from mame_sd.core.restore import ChosenTokens
from mame_sd.diffusion.context import Tokens
from mame_sd.errors import UserError
from mame_sd.runs.loading import LoadedModel
from mame_sd.runs.merging import InstalledMethod, Merging, NotApplicable


@dataclass(frozen=True)
class Copied:
    """Merging with `config`, where restored tokens are copies.

    Attributes:
        config: the settings.
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
            choose = copying_frames if self.frames else copying
            hook.choose = choose(hook.choose)  # type: ignore[method-assign]
        return installed


@dataclass(frozen=True, eq=False)
class CopiedTokens(ChosenTokens):
    """Chosen tokens that are copied to all others.

    Attributes:
        nearest: LongTensor [B * T, P], the chosen token that is nearest to each slot.
    """

    nearest: Tensor = field(kw_only=True)

    def _fitted(self, parts: Tensor) -> Tensor:
        return parts.gather(1, self.nearest.unsqueeze(-1).expand(-1, -1, parts.shape[-1]))


def copying(choose: Callable[..., ChosenTokens]) -> Callable[..., ChosenTokens]:
    """Return `choose` of a hook, so that its chosen tokens are copied to the others."""

    def choose_and_copy(x: Tensor, *given: Any) -> ChosenTokens:
        chosen = choose(x, *given)
        tiles, width, count = chosen.kernel.shape
        with torch.no_grad():
            slots = chosen.cells.to_slots(x).reshape(tiles, width, -1).float()
            points = chosen.take(x).reshape(tiles, count, -1).float()
            nearest = torch.cdist(slots, points).argmin(-1)
            return CopiedTokens(**vars(chosen), nearest=nearest)

    return choose_and_copy


@dataclass(frozen=True, eq=False)
class CopiedFrames(ChosenTokens):
    """The tokens of every second frame, which are copied to the following one.

    Attributes:
        size: (t, h, w) of the video's tokens.
    """

    size: tuple[int, ...] = field(kw_only=True)

    def restore(self, f: Tensor) -> Tensor:
        """Return all tokens [B, L, C], copied from f [B, n, C] of every second frame."""
        frames = f.unflatten(1, (-1, self.size[1] * self.size[2])).repeat_interleave(2, 1)
        return frames[:, : self.size[0]].flatten(1, 2)


def copying_frames(choose: Callable[..., ChosenTokens]) -> Callable[..., ChosenTokens]:
    """Return `choose` of a hook, so that it chooses every second frame of a video."""

    def choose_frames(x: Tensor, config: MaMeConfig, tokens: Tokens) -> ChosenTokens:
        if len(tokens.size) != 3:
            raise NotApplicable("copied frames: expected a video, got an image")
        every = torch.arange(tokens.count, device=x.device).unflatten(0, (tokens.size[0], -1))
        at = every[::2].flatten().expand(len(x), -1)
        return CopiedFrames(**{**vars(choose(x, config, tokens)), "at": at}, size=tokens.size)

    return choose_frames
