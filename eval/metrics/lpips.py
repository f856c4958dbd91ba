"""Compute LPIPS of image pairs (Zhang et al., 2018, version 0.1), a perceptual distance.

It is the distance between unit-length features of a classifier, weighted per channel, and 0 for
equal images. Own code, because torchmetrics and the authors' package build their networks with
torchvision: its wheels fit one build of torch and break diffusers next to another.

The distance depends on the resolution (one pair scores 0.72, 0.70 and 0.54 at 64, 256 and 768
pixels). So compare at one size and say which.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ..images import check_pair
from ..networks import full_precision
from ..weights.files import Tensors, tensors_sha256

MIN_SIDE = 32  # the smallest side that AlexNet can pool
# of inputs in [-1, 1], from the authors' code
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
_PIXELS_AT_ONCE = 4 * 512 * 512
Layer = Callable[..., Tensor]  # (x, stride=1, padding=0): the next convolution and its ReLU


def _alexnet(x: Tensor, layer: Layer) -> Iterator[Tensor]:
    """Yield the features of AlexNet's five convolutions."""
    yield (x := layer(x, stride=4, padding=2))
    yield (x := layer(F.max_pool2d(x, 3, 2), padding=2))
    yield (x := layer(F.max_pool2d(x, 3, 2), padding=1))
    yield (x := layer(x, padding=1))
    yield layer(x, padding=1)


class Lpips:
    """LPIPS with the features of AlexNet. Call it with two batches of images.

    Args:
        tensors: `conv{i}.weight`, `conv{i}.bias` in the order of torchvision's classifier, and
            `head{i}` [channels].
        device: where it computes.
    """

    name = "lpips-alex"

    def __init__(self, tensors: Tensors, device: torch.device | str = "cpu") -> None:
        self.weights_hash = tensors_sha256(tensors)
        self.tensors = {name: value.to(device, torch.float32) for name, value in tensors.items()}
        self.device = torch.device(device)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute the distance of each pair, float64 [n] on the CPU.

        Args:
            a: [n, 3, H, W] in [0, 1], with sides of at least 32.
            b: the same shape and range.

        Raises:
            ValueError: shapes differ or are too small, or values are outside [0, 1] or NaN.
        """
        check_pair(a, b)
        if min(a.shape[-2:]) < MIN_SIDE:
            raise ValueError(
                f"expected images of at least {MIN_SIDE} x {MIN_SIDE} for LPIPS, got {a.shape[-1]}"
                f" x {a.shape[-2]}"
            )
        step = max(1, _PIXELS_AT_ONCE // (a.shape[-2] * a.shape[-1]))
        with full_precision():
            pairs = zip(a.split(step), b.split(step), strict=True)
            return torch.cat([self._distance(*pair) for pair in pairs])

    def _distance(self, a: Tensor, b: Tensor) -> Tensor:
        images = 2 * torch.cat((a, b)).to(self.device, torch.float32) - 1
        shift, scale = (images.new_tensor(values)[:, None, None] for values in (SHIFT, SCALE))
        numbers = itertools.count()

        def layer(x: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
            name = f"conv{next(numbers)}"
            weight, bias = (self.tensors[f"{name}.{part}"] for part in ("weight", "bias"))
            return F.relu(F.conv2d(x, weight, bias, stride, padding))

        total = torch.zeros(len(a), dtype=torch.float64)
        for index, features in enumerate(_alexnet((images - shift) / scale, layer)):
            unit = features / (features.square().sum(1, keepdim=True).sqrt() + 1e-10)
            gap = (unit[: len(a)] - unit[len(a) :]).square()  # [n, channels, h, w]
            weighed = torch.einsum("nchw,c->nhw", gap, self.tensors[f"head{index}"])
            total += weighed.mean((1, 2)).cpu().double()
        return total
