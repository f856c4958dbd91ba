"""FID and KID by the code of the clean-fid package itself (Parmar et al., CVPR 2022, arXiv
2104.11222), for ``--fid-backend``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from mame_sd.errors import MachineError, UserError, first_line

from ..weights.files import file_sha256

METRICS = ("fid", "kid", "fid_to_baseline")
_BATCH = 32
_WEIGHTS = Path("/tmp/inception-2015-12-05.pt")  # where the package keeps Inception


@dataclass
class CleanFid:
    """The package's Inception and its two distances; ``extract`` maps a batch of images to features
    [n, 2048].
    """

    extract: Any
    device: torch.device
    name: str
    weights_hash: str
    resize: str = "clean (PIL bicubic, antialiased)"

    def features(self, files: Sequence[Path]) -> Any:
        """Features [n, 2048], float, of image files."""
        from cleanfid import fid

        paths = [str(path) for path in files]
        return fid.get_files_features(
            paths,
            self.extract,
            num_workers=0,
            batch_size=_BATCH,
            device=self.device,
            mode="clean",
            verbose=False,
        )

    def distance(self, metric: str, run: Any, other: Any) -> float:
        """The package's FID, or for "kid" its KID over random subsets, of two arrays of
        features.
        """
        import numpy as np
        from cleanfid import fid

        if metric == "kid":
            np.random.seed(0)  # noqa: NPY002 - it draws its subsets from the global generator
            return float(fid.kernel_distance(run, other))
        (mean, covariance), (other_mean, other_covariance) = (
            (x.mean(0), np.cov(x, rowvar=False)) for x in (run, other)
        )
        return float(fid.frechet_distance(mean, covariance, other_mean, other_covariance))


def load_clean_fid(device: torch.device, offline: bool = False) -> CleanFid:
    """The package with its own Inception, which it downloads to /tmp the first time.

    Raises:
        UserError: the package is missing, or torchvision doesn't fit torch.
        MachineError: its weights are not there and can't be fetched.
    """
    wanted = (
        "--fid-backend clean-fid: expected the package clean-fid and a torchvision that fits torch"
    )
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        raise UserError(
            f"{wanted} {torch.__version__}, but {first_line(error)}; install torchvision from where"
            " torch came from, or leave --fid-backend out"
        ) from error
    try:
        from cleanfid.features import build_feature_extractor
    except ImportError as error:
        raise UserError(
            f"{wanted}, but {first_line(error)}; pip install mame-sd[clean-fid]"
        ) from error
    if offline and not _WEIGHTS.is_file():
        raise UserError(
            f"--fid-backend clean-fid: expected its Inception at {_WEIGHTS}, got --offline; put it"
            " there"
        )
    try:
        extract = build_feature_extractor("clean", device, use_dataparallel=False)
    except Exception as error:  # urllib's, OSError, a file that is no TorchScript
        raise MachineError(
            f"--fid-backend clean-fid: expected to load its Inception, but {first_line(error)};"
            f" check the network, or put inception-2015-12-05.pt into {_WEIGHTS.parent}"
        ) from error
    return CleanFid(extract, device, f"clean-fid {version('clean-fid')}", file_sha256(_WEIGHTS))
