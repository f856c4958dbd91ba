"""Networks of metrics and trained models for evaluation, with published weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute as the scores are defined, for a `with` block.

    Gradients are off, products are in float32 without TensorFloat-32 or bfloat16, and kernels are
    deterministic. The caller's settings are restored afterwards.
    """
    cuda: Any = torch.backends.cudnn
    cpu: Any = torch.backends.mkldnn
    wanted = [
        *(
            (place, "fp32_precision", "ieee")
            for place in (torch.backends.cuda.matmul, cuda.conv, cpu.matmul, cpu.conv)
        ),
        (cuda, "deterministic", True),
        (cuda, "benchmark", False),
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in wanted]
    try:
        for place, name, value in wanted:
            setattr(place, name, value)
        with torch.no_grad():
            yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)
