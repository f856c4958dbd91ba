"""Extract features of images, for distances between sets.

Inception gives features for FID and KID and logits for the Inception score in one pass, DINOv2
features for FD-DINOv2 (arXiv 2306.04675). Both sides of every comparison are resized as clean-fid
does (Pillow's antialiased bicubic in floats, per channel), because another resizing changes a
distance by more than most methods differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..images import load_image
from ..weights.files import Tensors, tensors_sha256
from ..weights.load import load
from . import full_precision, inception
from .pretrained import DEVIATION, MEAN


@dataclass(frozen=True)
class Features:
    """Features [N, D] and logits [N, K] of N images, float32 on the CPU; K is 0 without classes."""

    features: Tensor
    logits: Tensor


class Extractor:
    """A network behind distances between sets.

    Args:
        tensors: its state dict.
        device: where it computes.

    Attributes:
        side: side of the images that it sees, in pixels.
    """

    name: str
    side: int

    def __init__(self, tensors: Tensors, device: torch.device | str = "cpu") -> None:
        self.weights_hash = tensors_sha256(tensors)
        self._device = torch.device(device)

    @property
    def resize(self) -> str:
        """Name the way in which images are resized for the network."""
        return f"clean-fid bicubic {self.side}"

    def see(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [1, D] and logits [1, K] of an image [1, 3, side, side] in 0..255."""
        raise NotImplementedError

    def __call__(self, images: Sequence[np.ndarray] | Sequence[Path]) -> Features:
        """Compute features and logits of images of any size, in their order.

        Each image is computed alone: in a batch the last digits depend on the others.

        Args:
            images: uint8 [H, W, 3] arrays, or image files.

        Raises:
            UserError: a file isn't a whole 8-bit RGB image.
            ValueError: there is no image, or one that isn't uint8 [H, W, 3].
        """
        if not len(images):
            raise ValueError("expected at least one image, got none")
        features = []
        for image in images:
            small = resize(_pixels(image), self.side)[None].to(self._device)
            with full_precision():
                features.append(self.see(small))
        return Features(*(torch.cat(rows).float().cpu() for rows in zip(*features, strict=True)))


class Inception(Extractor):
    """The Inception of FID, KID and the Inception score."""

    name, side = "Inception", inception.SIDE

    def __init__(self, tensors: Tensors, device: torch.device | str = "cpu") -> None:
        super().__init__(tensors, device)
        self._tensors = {name: value.to(device, torch.float32) for name, value in tensors.items()}

    def see(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [1, 2048] and logits [1, 1008]."""
        return inception.inception(self._tensors, pixels)


class DinoV2(Extractor):
    """DINOv2-S, whose class token FD-DINOv2 compares; images are normalised as in its training.

    Args:
        model: a Dinov2Model of transformers.
        device: where it computes.
    """

    name, side = "DINOv2-S", 224

    def __init__(self, model: Any, device: torch.device | str = "cpu") -> None:
        super().__init__(model.state_dict(), device)
        self._model = model.to(device, torch.float32)

    def see(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class token [1, 384], and no logits."""
        mean, deviation = (pixels.new_tensor(v)[:, None, None] for v in (MEAN, DEVIATION))
        tokens = self._model((pixels / 255 - mean) / deviation).last_hidden_state
        return tokens[:, 0], tokens.new_zeros(1, 0)


def resize(image: np.ndarray, side: int) -> Tensor:
    """Resize a uint8 [H, W, 3] as clean-fid's "clean" mode: float [3, side, side] in 0..255."""
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
    """Load Inception with its published weights.

    Args:
        weights_dir: folder that is searched first.
        offline: if True, nothing is fetched.
        device: where it computes.

    Raises:
        UserError: as `weights.load.find`.
        MachineError: as `weights.load.find`.
    """
    return Inception(load("inception-fid", weights_dir, offline), device)


def _pixels(image: np.ndarray | Path) -> np.ndarray:
    pixels = load_image(image) if isinstance(image, Path) else image
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(
            f"expected uint8 images [height, width, 3], got {pixels.dtype} {list(pixels.shape)}"
        )
    return pixels
