"""How far a row's samples and velocities are from those of the unmerged instrument."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from mame_sd.eval.instruments.flow import (
    guided_velocity,
    noise_of,
    noised,
    relative_error,
    sample,
)
from mame_sd.eval.instruments.models import Instrument
from mame_sd.eval.instruments.rows import Row, swapped

TIMES = (0.2, 0.5, 0.8)  # where velocities are compared
NOISE = 1_000_000  # seed of their noise; samples have small seeds


def samples_of(
    row: Row,
    instrument: Instrument,
    thumbnails: Tensor,
    steps: int = 4,
    guidance: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """Return a row's samples [B, *kind.shape]; arguments as for `flow.sample`."""
    steps = max(1, steps - row.fewer)
    if row.side:
        return _smaller(row.side, instrument, thumbnails, steps, guidance, seed)
    with row.on(instrument):
        return sample(instrument, thumbnails, steps, guidance, seed)


def decibels(samples: Tensor, reference: Tensor) -> Tensor:
    """Return the PSNR of each sample [B], in dB; samples are in -1..1."""
    return 10 * torch.log10(4 / (samples - reference).flatten(1).square().mean(1))


def texture(samples: Tensor) -> Tensor:
    """Return the mean difference of neighbours in a row, of each sample [B]."""
    return samples.diff(dim=-1).abs().flatten(1).mean(1)


@torch.no_grad()
def velocities_of(
    row: Row, instrument: Instrument, clean: Tensor, thumbnails: Tensor, seed: int = NOISE
) -> list[Tensor]:
    """Return a row's velocities [B, *kind.shape] at `TIMES`, of clean samples with noise."""
    with row.on(instrument):
        return [
            guided_velocity(instrument, noised(clean, time, seed)[0], time, thumbnails)
            for time in TIMES
        ]


def velocity_errors(velocities: list[Tensor], references: list[Tensor]) -> list[list[float]]:
    """Return the relative error of each sample's velocity, for each of `TIMES`."""
    pairs = zip(velocities, references, strict=True)
    return [relative_error(velocity, reference).tolist() for velocity, reference in pairs]


def _smaller(
    side: int, instrument: Instrument, thumbnails: Tensor, steps: int, guidance: float, seed: int
) -> Tensor:
    """Return samples that are made with `side` pixels a side and enlarged.

    Their noise is the own one's, reduced; so are the positions.
    """
    shape = instrument.kind.shape
    noise = F.interpolate(noise_of(instrument, len(thumbnails), seed), (side, side), mode="area")
    noise = noise / noise.std()
    with _positions(instrument, side // 2):
        small = sample(instrument, thumbnails, steps, guidance, noise=noise)
    return F.interpolate(small, shape[-2:], mode="bicubic", align_corners=False).clamp(-1, 1)


@contextmanager
def _positions(instrument: Instrument, side: int) -> Iterator[None]:
    """Reduce the embedding of positions to `side` x `side` tokens for a `with` block."""
    embed = instrument.model.pos_embed
    own = embed.pos_embed  # [1, tokens, channels]
    grid = own.unflatten(1, (embed.pos_embed_max_size, -1)).movedim(-1, 1)
    reduced = F.interpolate(grid, (side, side), mode="bilinear", antialias=True)
    with (
        swapped(embed, "pos_embed", reduced.flatten(2).transpose(1, 2)),
        swapped(embed, "pos_embed_max_size", side),
    ):
        yield
