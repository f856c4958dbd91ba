"""Benchmarks that print figures of the documentation's pages.

A benchmark that times something warms up and times its rows in turns.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with the text as it is."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=about, formatter_class=raw)


def decibels(samples: Tensor, reference: Tensor, where: Tensor | None = None) -> Tensor:
    """Return the PSNR of each sample in -1..1, [N].

    Args:
        samples: [N, C, H, W].
        reference: the same shape.
        where: the pixels that count, or their weights [N, H, W]. If None, all.
    """
    error = (samples - reference).square().mean(1)
    where = torch.ones_like(error) if where is None else where
    mean = (error * where).sum((1, 2)) / where.sum((1, 2)).clamp_min(1)
    return 10 * torch.log10(4 / mean.clamp_min(1e-12))
