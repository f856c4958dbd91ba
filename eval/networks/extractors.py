"""What a classifier sees in images: features for distances, logits for the Inception score, in one
pass.

Both sides of every comparison are resized by clean-fid's path (Pillow's antialiased bicubic in
floats, per channel). Another resizing moves a distance by more than most methods differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..images import load_image
from ..weights.files import Tensors, tensors_sha256
from ..weights.load import load
from . import full_precision, inception


@dataclass(frozen=True)
class Features:
    """Features [N, D] and logits [N, K] of N images, float32 on the CPU."""

    features: Tensor
    logits: Tensor


class Extractor:
    """Inception behind the distances and the Inception score.

    Attributes:
        name: of the network.
        weights_hash: sha256 of its weights.
        resize: how images are brought to its size.
        dims: length of a feature vector.
    """

    name, dims = "Inception", inception.DIMS
    resize = f"clean-fid bicubic {inception.SIDE}"

    def __init__(self, tensors: Tensors, device: torch.device | str = "cpu") -> None:
        """`tensors`: the state dict."""
        self.weights_hash = tensors_sha256(tensors)
        self._device = torch.device(device)
        self._tensors = {name: value.to(device, torch.float32) for name, value in tensors.items()}

    def __call__(self, images: Sequence[np.ndarray] | Sequence[Path]) -> Features:
        """Features and logits of images (uint8 [H, W, 3], of any sizes) or image files, in their
        order.

        One image at a time: in a batch the last digits depend on the neighbours.

        Raises:
            UserError: a file is not a whole 8-bit RGB image.
            ValueError: no image, or one that is not uint8 [H, W, 3].
        """
        if not len(images):
            raise ValueError("expected at least one image, got none")
        found = []
        for image in images:
            small = resize(_pixels(image), inception.SIDE)[None].to(self._device)
            with full_precision():
                found.append(inception.inception(self._tensors, small))
        return Features(*(torch.cat(rows).float().cpu() for rows in zip(*found, strict=True)))


def resize(image: np.ndarray, side: int) -> Tensor:
    """Float [3, side, side] in 0..255 of a uint8 [H, W, 3], as clean-fid's "clean" mode does it."""
    channels = [
        np.asarray(
            Image.fromarray(image[..., index].astype(np.float32)).resize(
                (side, side), Image.Resampling.BICUBIC
            )
        )
        for index in range(3)
    ]
    return torch.from_numpy(np.stack(channels).clip(0, 255))


def load_inception(
    weights_dir: Path | None = None, offline: bool = False, device: torch.device | str = "cpu"
) -> Extractor:
    """Inception with its published weights.

    Raises UserError or MachineError where they can't be had (`weights.find`).
    """
    return Extractor(load("inception-fid", weights_dir, offline), device)


def _pixels(image: np.ndarray | Path) -> np.ndarray:
    pixels = load_image(image) if isinstance(image, Path) else image
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(
            f"expected uint8 images [height, width, 3], got {pixels.dtype} {list(pixels.shape)}"
        )
    return pixels
