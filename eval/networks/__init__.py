"""Networks of metrics and trained models for evaluation, with published weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute as the scores are defined, for a `with` block.

    There are no gradients, products are in whole float32 and kernels are repeatable, whatever the
    caller allows elsewhere. Settings of TensorFloat-32 and bfloat16 are restored afterwards.
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
