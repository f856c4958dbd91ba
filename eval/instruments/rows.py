"""The rows that an instrument measures: settings of merging, and what merging has to beat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.core import restore
from mame_sd.core.restore import ChosenTokens
from mame_sd.diffusion import restoring
from mame_sd.diffusion.apply_denoiser import apply_mame
from mame_sd.eval.instruments.models import Instrument
from mame_sd.eval.rivals.method import Rival
from mame_sd.eval.rivals.plans import random_keys

MIN_TOKENS = 1024  # on every device, so that all devices merge the same
BANDWIDTHS = (0.5, 1.0, 2.0, 4.0, 8.0)
RIDGES = (0.02, 0.005, 0.002, 0.0005)

Weights = Callable[[Tensor, ChosenTokens], Tensor]  # of all tokens x: others for the chosen ones


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to compute an instrument.

    Attributes:
        label: for tables.
        settings: fields of `MaMeConfig`; None: nothing merges.
        rival: keys chosen in another way, in place of `settings`.
        constants: of `mame_sd.core.restore`, by name.
        weights: what restores tokens in place of the fit.
        mean_attention: whether each query gets the mean of the values.
        fewer: denoising steps that are left out.
        side: pixels a side of a smaller image, which is enlarged; 0: the instrument's own.
    """

    label: str
    settings: Mapping[str, Any] | None = None
    rival: Rival | None = None
    constants: Mapping[str, float] = field(default_factory=dict)
    weights: Weights | None = None
    mean_attention: bool = False
    fewer: int = 0
    side: int = 0

    @contextmanager
    def on(self, instrument: Instrument) -> Iterator[None]:
        """Compute `instrument` in this way for a `with` block."""
        with ExitStack() as on:
            for name, value in self.constants.items():
                on.enter_context(swapped(restore, name, value))
            if self.weights is not None:
                choose = restoring_by(self.weights)
                on.enter_context(swapped(restoring, "choose_tokens", choose))
            if self.mean_attention:
                on.enter_context(swapped(F, "scaled_dot_product_attention", mean_of_values))
            if self.rival is not None:
                on.enter_context(self.rival.on(instrument.model))
            elif self.settings is not None:
                # The default itself decides which layers take part.
                given = {"min_tokens": MIN_TOKENS, **self.settings} if self.settings else {}
                on.callback(apply_mame(instrument.model, **given).remove)
            yield


@contextmanager
def swapped(module: Any, name: str, value: Any) -> Iterator[None]:
    """Put `value` in place of an attribute for a `with` block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def restoring_by(weights: Weights) -> Callable[..., ChosenTokens]:
    """Return `choose_tokens` with other weights for the same tokens."""
    choose = restore.choose_tokens

    def chosen(x: Tensor, *given: Any) -> ChosenTokens:
        found = choose(x, *given)
        with torch.no_grad():
            return replace(found, weights=weights(x, found))

    return chosen


def copied(x: Tensor, chosen: ChosenTokens) -> Tensor:
    """Return weights that copy the nearest chosen token, as token merging does."""
    tiles, width, count = chosen.weights.shape
    slots = chosen.cells.to_slots(x).reshape(tiles, width, -1).float()
    points = chosen.take(x).reshape(tiles, count, -1).float()
    return F.one_hot(torch.cdist(slots, points).argmin(-1), count).to(chosen.weights)


def averaged(x: Tensor, chosen: ChosenTokens) -> Tensor:
    """Return weights that give every token the mean of the chosen ones."""
    return torch.full_like(chosen.weights, 1 / chosen.weights.shape[-1])


def mean_of_values(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stand in for `scaled_dot_product_attention`: attention that tells nothing of space."""
    return value.mean(-2, keepdim=True).expand(*query.shape[:-1], value.shape[-1])


def _random(share: float) -> Rival:
    return Rival("random keys", random_keys, {"share": share}, min_tokens=MIN_TOKENS)


def _mlp(share: float, **more: Any) -> dict[str, Any]:
    return {"keep": 1.0, "mlp_keep": share, **more}


def _block(share: float, **more: Any) -> dict[str, Any]:
    return {"keep": 1.0, "block_keep": share, **more}


REFERENCE = "unmerged"
ROWS: dict[str, Row] = {
    REFERENCE: Row(label="unmerged"),
    "fewer-1": Row(label="one step fewer", fewer=1),
    "fewer-2": Row(label="two steps fewer", fewer=2),
    "default": Row(label="default", settings={}),
    "keys-0.25": Row(label="keys a quarter", settings={"keep": 0.25}),
    "keys-0.5": Row(label="keys a half", settings={"keep": 0.5}),
    "mlp-0.125": Row(label="MLPs an eighth", settings=_mlp(0.125)),
    "mlp-0.25": Row(label="MLPs a quarter", settings=_mlp(0.25)),
    "keys-mlp-0.125": Row(
        label="keys a quarter, MLPs an eighth", settings=_mlp(0.125, keep=0.25)
    ),
    "keys-0.5-mlp-0.125": Row(
        label="keys a half, MLPs an eighth", settings=_mlp(0.125, keep=0.5)
    ),
    "block-0.25": Row(label="blocks a quarter", settings=_block(0.25)),
    "block-0.5": Row(label="blocks a half", settings=_block(0.5)),
    "keys-block-0.25": Row(
        label="keys a quarter, blocks a quarter", settings=_block(0.25, keep=0.25)
    ),
    "random-0.25": Row(label="a quarter of the keys at random", rival=_random(0.25)),
    "copied-mlp-0.125": Row(
        label="MLPs an eighth, copied", settings=_mlp(0.125), weights=copied
    ),
    "copied-mlp-0.25": Row(label="MLPs a quarter, copied", settings=_mlp(0.25), weights=copied),
    "copied-block-0.25": Row(
        label="blocks a quarter, copied", settings=_block(0.25), weights=copied
    ),
    "cells-mlp-0.125": Row(
        label="MLPs an eighth, without the farthest",
        settings=_mlp(0.125),
        constants={"DRAWN": 1.0},
    ),
    "cells-block-0.25": Row(
        label="blocks a quarter, without the farthest",
        settings=_block(0.25),
        constants={"DRAWN": 1.0},
    ),
    "mean-mlp": Row(label="MLPs: the mean of an eighth", settings=_mlp(0.125), weights=averaged),
    "mean-attention": Row(label="mean attention", mean_attention=True),
    "smaller-48": Row(label="48 x 48 pixels", side=48),
}  # fmt: skip


def constants_rows() -> dict[str, Row]:
    """Return a row for each bandwidth and ridge of the fit, of MLPs and of blocks."""
    return {
        f"{kind}-{bandwidth:g}-{ridge:g}": Row(
            label=f"{kind}, bandwidth {bandwidth:g}, ridge {ridge:g}",
            settings=settings,
            constants={"BANDWIDTH": bandwidth, "RIDGE": ridge},
        )
        for kind, settings in (("mlp-0.125", _mlp(0.125)), ("block-0.25", _block(0.25)))
        for bandwidth in BANDWIDTHS
        for ridge in RIDGES
    }
