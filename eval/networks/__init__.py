"""The networks that metrics look through, as their authors defined them: inference only, weights given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """Inference as the scores are defined: no gradients, and on CUDA whole float32 (not TF32) by repeatable kernels."""
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield
