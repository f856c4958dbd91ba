"""The networks that metrics look through, as their authors defined them: inference only, weights
given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """Inference as the scores are defined: no gradients, whole float32 whatever the user allows,
    and repeatable kernels.

    TensorFloat-32 and bfloat16 in matrix products and convolutions are put back afterwards as they
    were.
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
