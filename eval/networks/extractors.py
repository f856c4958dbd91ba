"""What networks see in images: Inception's features for distances and logits for the Inception
score, in one pass, and DINOv2's features for distances (arXiv 2306.04675).

Both sides of every comparison are resized by clean-fid's path (Pillow's antialiased bicubic in
floats, per channel). Another resizing moves a distance by more than most methods differ.
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
from .pretrained import DEVIATION, MEAN, load_dinov2


@dataclass(frozen=True)
class Features:
    """Features [N, D] and logits [N, K] of N images, float32 on the CPU; K is 0 for a network
    without classes.
    """

    features: Tensor
    logits: Tensor


class Extractor:
    """A network behind distances between sets.

    Attributes:
        name: of the network.
        side: pixels a side of what it sees.
        dims: length of a feature vector.
        weights_hash: sha256 of its weights.
    """

    name: str
    side: int
    dims: int

    def __init__(self, tensors: Tensors, device: torch.device | str = "cpu") -> None:
        """`tensors`: the state dict."""
        self.weights_hash = tensors_sha256(tensors)
        self._device = torch.device(device)

    @property
    def resize(self) -> str:
        """How images are brought to its size."""
        return f"clean-fid bicubic {self.side}"

    def see(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Features [1, D] and logits [1, K] of an image [1, 3, side, side] in 0..255."""
        raise NotImplementedError

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
            small = resize(_pixels(image), self.side)[None].to(self._device)
            with full_precision():
                found.append(self.see(small))
        return Features(*(torch.cat(rows).float().cpu() for rows in zip(*found, strict=True)))


class Inception(Extractor):
    """The Inception of FID, KID and the Inception score."""

    name, side, dims = "Inception", inception.SIDE, inception.DIMS

    def __init__(self, tensors: Tensors, device: torch.device | str = "cpu") -> None:
        super().__init__(tensors, device)
        self._tensors = {name: value.to(device, torch.float32) for name, value in tensors.items()}

    def see(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        return inception.inception(self._tensors, pixels)


class DinoV2(Extractor):
    """DINOv2-S, whose class token FD-DINOv2 compares, normalised as its training's images were."""

    name, side, dims = "DINOv2-S", 224, 384

    def __init__(self, model: Any, device: torch.device | str = "cpu") -> None:
        """`model`: a Dinov2Model of transformers."""
        super().__init__(model.state_dict(), device)
        self._model = model.to(device, torch.float32)

    def see(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        mean, deviation = (pixels.new_tensor(v)[:, None, None] for v in (MEAN, DEVIATION))
        tokens = self._model((pixels / 255 - mean) / deviation).last_hidden_state
        return tokens[:, 0], tokens.new_zeros(1, 0)


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
    return Inception(load("inception-fid", weights_dir, offline), device)


def load_dinov2_extractor(
    weights_dir: Path | None = None, offline: bool = False, device: torch.device | str = "cpu"
) -> Extractor:
    """DINOv2-S with its published weights.

    Raises UserError or MachineError where they can't be had (`weights.find`).
    """
    return DinoV2(load_dinov2(weights_dir, offline), device)


def _pixels(image: np.ndarray | Path) -> np.ndarray:
    pixels = load_image(image) if isinstance(image, Path) else image
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(
            f"expected uint8 images [height, width, 3], got {pixels.dtype} {list(pixels.shape)}"
        )
    return pixels
