"""The Inception-v3 that FID, KID and IS are defined on: TensorFlow's graph of 2015-12-05, with
1,008 classes.

It differs from torchvision's. Average pools leave padding out, the last block pools by maximum,
inputs are (x - 128) / 128. Scores take logits without the bias. Tensors carry the names of the
published state dicts (pytorch-fid, torch-fidelity).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

SIDE, DIMS, CLASSES = 299, 2048, 1008
Tensors = dict[str, Tensor]


def inception(tensors: Tensors, images: Tensor) -> tuple[Tensor, Tensor]:
    """Pooled features [n, 2048] and logits without bias [n, 1008] of images [n, 3, 299, 299] in
    0..255.
    """
    net = _Net(tensors)
    x = (images - 128) / 128
    x = net.conv("Conv2d_2a_3x3", net.conv("Conv2d_1a_3x3", x, stride=2), same=False)
    x = F.max_pool2d(net.conv("Conv2d_2b_3x3", x), 3, 2)
    x = F.max_pool2d(net.conv("Conv2d_4a_3x3", net.conv("Conv2d_3b_1x1", x), same=False), 3, 2)
    for name in ("Mixed_5b", "Mixed_5c", "Mixed_5d"):
        x = _block_a(net, name, x)
    x = _block_b(net, "Mixed_6a", x)
    for name in ("Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e"):
        x = _block_c(net, name, x)
    x = _block_d(net, "Mixed_7a", x)
    x = _block_e(net, "Mixed_7b", x, F.avg_pool2d(x, 3, 1, 1, count_include_pad=False))
    x = _block_e(net, "Mixed_7c", x, F.max_pool2d(x, 3, 1, 1))
    features = x.mean((2, 3))
    return features, features @ tensors["fc.weight"].T


class _Net:
    """Applies layers by their name in the state dict."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def conv(self, name: str, x: Tensor, stride: int = 1, same: bool = True) -> Tensor:
        """Convolution, batch norm, ReLU.

        Strided ones take no padding; others keep the size if `same`.
        """
        weight = self.tensors[f"{name}.conv.weight"]
        padding = (weight.shape[2] // 2, weight.shape[3] // 2) if same and stride == 1 else 0
        x = F.conv2d(x, weight, stride=stride, padding=padding)
        mean, var, gain, bias = (
            self.tensors[f"{name}.bn.{key}"]
            for key in ("running_mean", "running_var", "weight", "bias")
        )
        return F.relu(F.batch_norm(x, mean, var, gain, bias, eps=0.001))

    def chain(self, name: str, count: int, x: Tensor, last_stride: int = 1) -> Tensor:
        """The convolutions `{name}_1` to `{name}_{count}` in a row."""
        for index in range(1, count + 1):
            x = self.conv(f"{name}_{index}", x, stride=last_stride if index == count else 1)
        return x


def _block_a(net: _Net, name: str, x: Tensor) -> Tensor:
    pooled = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
    return torch.cat(
        (
            net.conv(f"{name}.branch1x1", x),
            net.chain(f"{name}.branch5x5", 2, x),
            net.chain(f"{name}.branch3x3dbl", 3, x),
            net.conv(f"{name}.branch_pool", pooled),
        ),
        1,
    )


def _block_b(net: _Net, name: str, x: Tensor) -> Tensor:
    wide = net.conv(f"{name}.branch3x3", x, stride=2)
    return torch.cat(
        (wide, net.chain(f"{name}.branch3x3dbl", 3, x, last_stride=2), F.max_pool2d(x, 3, 2)), 1
    )


def _block_c(net: _Net, name: str, x: Tensor) -> Tensor:
    pooled = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
    return torch.cat(
        (
            net.conv(f"{name}.branch1x1", x),
            net.chain(f"{name}.branch7x7", 3, x),
            net.chain(f"{name}.branch7x7dbl", 5, x),
            net.conv(f"{name}.branch_pool", pooled),
        ),
        1,
    )


def _block_d(net: _Net, name: str, x: Tensor) -> Tensor:
    return torch.cat(
        (
            net.chain(f"{name}.branch3x3", 2, x, last_stride=2),
            net.chain(f"{name}.branch7x7x3", 4, x, last_stride=2),
            F.max_pool2d(x, 3, 2),
        ),
        1,
    )


def _block_e(net: _Net, name: str, x: Tensor, pooled: Tensor) -> Tensor:
    middle = net.conv(f"{name}.branch3x3_1", x)
    double = net.chain(f"{name}.branch3x3dbl", 2, x)
    return torch.cat(
        (
            net.conv(f"{name}.branch1x1", x),
            net.conv(f"{name}.branch3x3_2a", middle),
            net.conv(f"{name}.branch3x3_2b", middle),
            net.conv(f"{name}.branch3x3dbl_3a", double),
            net.conv(f"{name}.branch3x3dbl_3b", double),
            net.conv(f"{name}.branch_pool", pooled),
        ),
        1,
    )
