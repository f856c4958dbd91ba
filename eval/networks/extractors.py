"""What a classifier sees in images: features for distances, logits for the Inception score, in one
pass, kept per image.

Both sides of every comparison are resized by clean-fid's path (Pillow's antialiased bicubic in
floats, per channel). Another resizing moves a distance by more than most methods differ. A network
that is not the standard one is never called FID.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..images import image_hash, load_image
from ..weights.files import Tensors, tensors_sha256
from ..weights.load import load
from . import efficientnet_lite, full_precision, inception
from .cache import FeatureCache
from .efficientnet_lite import EfficientNetLite0

VERSION = "features 1"  # of what the cache keeps: another one, and images are looked at again
Forward = Callable[
    [Tensor], tuple[Tensor, Tensor]
]  # images [n, 3, side, side] in 0..255 to features and logits


@dataclass(frozen=True)
class Features:
    """Features [N, D] and logits [N, K] of N images, float32 on the CPU."""

    features: Tensor
    logits: Tensor


class Extractor:
    """One network behind the distances.

    Attributes:
        name: "Inception" or "EffNetLite0".
        weights_hash: sha256 of its weights.
        resize: how images are brought to its size.
        dims: length of a feature vector.
    """

    def __init__(
        self,
        name: str,
        run: Forward,
        side: int,
        dims: int,
        weights_hash: str,
        device: torch.device | str = "cpu",
        cache: FeatureCache | None = None,
    ) -> None:
        self.name, self.weights_hash, self.dims = name, weights_hash, dims
        self.resize = f"clean-fid bicubic {side}"
        self._run, self._side, self._device, self._cache = run, side, torch.device(device), cache

    def __call__(self, images: Sequence[np.ndarray] | Sequence[Path]) -> Features:
        """Features and logits of images (uint8 [H, W, 3], of any sizes) or image files, in their
        order.

        One image at a time: in a batch the last digits depend on the neighbours, and so on the
            number of processes.

        Raises:
            UserError: a file is not a whole 8-bit RGB image.
            ValueError: no image, or one that is not uint8 [H, W, 3].
        """
        if not len(images):
            raise ValueError("expected at least one image, got none")
        found = [self._look(_pixels(image)) for image in images]
        return Features(
            *(torch.stack([row[key] for row in found]) for key in ("features", "logits"))
        )

    def _look(self, image: np.ndarray) -> dict[str, Tensor]:
        """`features` [D] and `logits` [K] of one image, from the cache if it has them."""
        cache = self._cache
        key = cache.key(VERSION, self.weights_hash, self.resize, image_hash(image)) if cache else ""
        kept = cache.get(key) if cache else None
        if kept is not None and set(kept) == {"features", "logits"}:
            return kept
        with full_precision():
            found = self._run(resize(image, self._side)[None].to(self._device))
        row = {
            name: value[0].float().cpu()
            for name, value in zip(("features", "logits"), found, strict=True)
        }
        if cache:
            cache.put(key, row)
        return row


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


def inception_extractor(
    tensors: Tensors, device: torch.device | str = "cpu", cache: FeatureCache | None = None
) -> Extractor:
    """The standard network of FID, KID and IS from the tensors of its state dict."""
    placed = {name: value.to(device, torch.float32) for name, value in tensors.items()}

    def run(images: Tensor) -> tuple[Tensor, Tensor]:
        return inception.inception(placed, images)

    return Extractor(
        "Inception", run, inception.SIDE, inception.DIMS, tensors_sha256(tensors), device, cache
    )


def effnet_lite0_extractor(
    tensors: Tensors, device: torch.device | str = "cpu", cache: FeatureCache | None = None
) -> Extractor:
    """EfficientNet-Lite0, whose weights a package registry carries."""
    network = EfficientNetLite0()
    network.load_state_dict(tensors)
    network.eval().requires_grad_(False).to(device)
    side, dims = efficientnet_lite.SIDE, efficientnet_lite.DIMS
    return Extractor("EffNetLite0", network, side, dims, tensors_sha256(tensors), device, cache)


_KINDS = {
    "inception": ("inception-fid", inception_extractor),
    "effnet-lite0": ("effnet-lite0", effnet_lite0_extractor),
}


def load_extractor(
    kind: str,
    weights_dir: Path | None = None,
    offline: bool = False,
    device: torch.device | str = "cpu",
    cache: Path | None = None,
) -> Extractor:
    """The extractor "inception" or "effnet-lite0" with its published weights; features are kept in
    the folder `cache`, if given.

    Raises:
        ValueError: unknown kind.
        UserError, MachineError: the weights can't be had (`weights.find`).
    """
    if kind not in _KINDS:
        raise ValueError(f"expected an extractor of {', '.join(_KINDS)}, got {kind!r}")
    weights, make = _KINDS[kind]
    return make(load(weights, weights_dir, offline), device, FeatureCache(cache) if cache else None)


def _pixels(image: np.ndarray | Path) -> np.ndarray:
    pixels = load_image(image) if isinstance(image, Path) else image
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(
            f"expected uint8 images [height, width, 3], got {pixels.dtype} {list(pixels.shape)}"
        )
    return pixels
