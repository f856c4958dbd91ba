"""Build the Inception-v3 that FID, KID and IS are defined on: TensorFlow's graph of 2015-12-05.

Own code, because torchmetrics takes this network from torch-fidelity, which imports torchvision
(see `eval.metrics.lpips`). It has 1,008 classes and differs from torchvision's: average pools leave
padding out, the last block pools by maximum, inputs are (x - 128) / 128. Scores use logits without
the bias. Tensors have the names of the published state dicts (pytorch-fid, torch-fidelity).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

SIDE = 299
Tensors = dict[str, Tensor]


def inception(tensors: Tensors, images: Tensor) -> tuple[Tensor, Tensor]:
    """Compute pooled features and logits.

    Args:
        tensors: the state dict.
        images: [n, 3, 299, 299] in 0..255.

    Returns:
        Features [n, 2048], and logits without bias [n, 1008].
    """
    net = _Net(tensors)
    x = (images - 128) / 128
    x = net.conv("Conv2d_2a_3x3", net.conv("Conv2d_1a_3x3", x, stride=2), same=False)
    x = F.max_pool2d(net.conv("Conv2d_2b_3x3", x), 3, 2)
    x = F.max_pool2d(net.conv("Conv2d_4a_3x3", net.conv("Conv2d_3b_1x1", x), same=False), 3, 2)
    for letter in "bcd":
        x = _mixed(net, f"Mixed_5{letter}", x, branch5x5=2, branch3x3dbl=3)
    x = _halved(net, "Mixed_6a", x, branch3x3=0, branch3x3dbl=3)
    for letter in "bcde":
        x = _mixed(net, f"Mixed_6{letter}", x, branch7x7=3, branch7x7dbl=5)
    x = _halved(net, "Mixed_7a", x, branch3x3=2, branch7x7x3=4)
    x = _split(net, "Mixed_7b", x, _average(x))
    x = _split(net, "Mixed_7c", x, F.max_pool2d(x, 3, 1, 1))
    features = x.mean((2, 3))
    return features, features @ tensors["fc.weight"].T


class _Net:
    """Apply layers by their name in the state dict."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def conv(self, name: str, x: Tensor, stride: int = 1, same: bool = True) -> Tensor:
        """Apply a convolution, batch norm and ReLU.

        Strided convolutions have no padding; others keep the size if `same`.
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
        """Apply the convolutions `{name}_1` to `{name}_{count}`; for 0 the one called `name`."""
        names = [f"{name}_{index + 1}" for index in range(count)] or [name]
        for one in names:
            x = self.conv(one, x, stride=last_stride if one == names[-1] else 1)
        return x


def _average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)


def _mixed(net: _Net, name: str, x: Tensor, **chains: int) -> Tensor:
    """Concatenate a convolution, chains of convolutions and a pooled one."""
    branches = [net.chain(f"{name}.{branch}", count, x) for branch, count in chains.items()]
    pooled = net.conv(f"{name}.branch_pool", _average(x))
    return torch.cat((net.conv(f"{name}.branch1x1", x), *branches, pooled), 1)


def _halved(net: _Net, name: str, x: Tensor, **chains: int) -> Tensor:
    """Concatenate chains that end with a stride, and a pool of the same stride."""
    branches = [net.chain(f"{name}.{branch}", count, x, 2) for branch, count in chains.items()]
    return torch.cat((*branches, F.max_pool2d(x, 3, 2)), 1)


def _split(net: _Net, name: str, x: Tensor, pooled: Tensor) -> Tensor:
    """Concatenate branches of which two end in pairs of convolutions."""
    middle = net.conv(f"{name}.branch3x3_1", x)
    double = net.chain(f"{name}.branch3x3dbl", 2, x)
    return torch.cat(
        (
            net.conv(f"{name}.branch1x1", x),
            *(net.conv(f"{name}.branch3x3_2{side}", middle) for side in "ab"),
            *(net.conv(f"{name}.branch3x3dbl_3{side}", double) for side in "ab"),
            net.conv(f"{name}.branch_pool", pooled),
        ),
        1,
    )
