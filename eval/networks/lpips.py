"""LPIPS (Zhang et al., 2018, version 0.1): distances between unit-length features of a classifier,
weighted per channel.

Tensors are named `conv{i}.weight`, `conv{i}.bias` in the order of torchvision's classifier and
`head{i}` [channels]; see `weights_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

Tensors = dict[str, Tensor]
SHIFT, SCALE = (
    (-0.030, -0.088, -0.188),
    (0.458, 0.448, 0.450),
)  # of inputs in [-1, 1], from the authors' code


class _Layers:
    """Hands out a classifier's convolutions one after the other."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, self._next = tensors, 0

    def __call__(self, x: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
        """The next convolution and its ReLU."""
        name = f"conv{self._next}"
        self._next += 1
        return F.relu(
            F.conv2d(
                x, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"], stride, padding
            )
        )


def _alex(x: Tensor, layer: _Layers) -> Iterator[Tensor]:
    yield (x := layer(x, stride=4, padding=2))
    yield (x := layer(F.max_pool2d(x, 3, 2), padding=2))
    yield (x := layer(F.max_pool2d(x, 3, 2), padding=1))
    yield (x := layer(x, padding=1))
    yield layer(x, padding=1)


def _vgg(x: Tensor, layer: _Layers) -> Iterator[Tensor]:
    for block, depth in enumerate((2, 2, 3, 3, 3)):
        if block:
            x = F.max_pool2d(x, 2, 2)
        for _ in range(depth):
            x = layer(x, padding=1)
        yield x


BACKBONES: dict[str, Callable[[Tensor, _Layers], Iterator[Tensor]]] = {
    "alex": _alex,
    "vgg": _vgg,
}


def distance(net: str, tensors: Tensors, a: Tensor, b: Tensor) -> Tensor:
    """LPIPS of each pair, float64 [n] on the CPU. `a` and `b` are [n, 3, H, W] in [-1, 1]."""
    shift, scale = (
        torch.tensor(values, dtype=a.dtype, device=a.device)[:, None, None]
        for values in (SHIFT, SCALE)
    )
    images = (torch.cat((a, b)) - shift) / scale
    total = torch.zeros(len(a), dtype=torch.float64)
    for index, features in enumerate(BACKBONES[net](images, _Layers(tensors))):
        unit = features / (features.square().sum(1, keepdim=True).sqrt() + 1e-10)
        gap = (unit[: len(a)] - unit[len(a) :]).square()  # [n, channels, h, w]
        total += (
            torch.einsum("nchw,c->nhw", gap, tensors[f"head{index}"]).mean((1, 2)).cpu().double()
        )
    return total
