"""Compute FID by the package clean-fid (Parmar et al., arXiv 2104.11222), for ``--fid-backend``.

The package is an extra of its own: it needs torchvision, whose wheels from PyPI break diffusers
next to a CPU build of torch.
"""

from __future__ import annotations

import os
import platform
import stat
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mame_sd.errors import MachineError, UserError, first_line

from ..weights.files import file_sha256

_BATCH = 32
# where the package keeps its Inception, and downloads it to
_SHA256 = "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4"
_WEIGHTS = Path("." if platform.system() == "Windows" else "/tmp", "inception-2015-12-05.pt")


@dataclass(frozen=True)
class CleanFid:
    """The package's Inception and its distance.

    Attributes:
        extract: computes features [n, 2048] of a batch of images.
        name: name and version of the package.
        resize: how images are brought to its size.
    """

    extract: Any
    device: torch.device
    name: str
    weights_hash: str
    resize: str = "clean (PIL bicubic, antialiased)"

    def features(self, files: Sequence[Path]) -> Any:
        """Compute features [n, 2048] of image files."""
        from cleanfid import fid

        return fid.get_files_features(
            [str(path) for path in files],
            self.extract,
            num_workers=0,
            batch_size=_BATCH,
            device=self.device,
            mode="clean",
            verbose=False,
        )

    def distance(self, a: Any, b: Any) -> float:
        """Compute the package's FID of two arrays of features.

        Raises UserError if the package finds no real square root of the covariances.
        """
        from cleanfid import fid

        moments = [m for x in (a, b) for m in (x.mean(0), np.cov(x, rowvar=False))]
        try:
            with redirect_stdout(sys.stderr):  # it prints that a product is singular
                return float(fid.frechet_distance(*moments))
        except ValueError as error:
            raise UserError(
                f"--fid-backend clean-fid: {first_line(error)}; give more images, or leave it out"
            ) from None


def load_clean_fid(device: torch.device, offline: bool = False) -> CleanFid:
    """Load the package with its own Inception, which it downloads the first time.

    The file is TorchScript, which can run any code: only the published one is loaded.

    Args:
        device: where it computes.
        offline: if True, nothing is fetched.

    Raises:
        UserError: the package is missing, torchvision doesn't fit torch, or the weights are
            missing while offline, are others, or can be changed by other people.
        MachineError: its weights are missing and can't be fetched.
    """
    try:
        from cleanfid.downloads_helper import check_download_inception
        from cleanfid.features import build_feature_extractor
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision is of another torch
        raise UserError(
            "--fid-backend clean-fid: expected the package clean-fid and a torchvision that fits"
            f" torch {torch.__version__}, but {first_line(error)}; pip install"
            " 'mame-sd[clean-fid]', and torchvision from where torch came from"
        ) from error
    if offline and not _WEIGHTS.is_file():
        raise UserError(
            f"--fid-backend clean-fid: expected its Inception at {_WEIGHTS}, found none, and"
            " --offline; put it there"
        )
    try:
        check_download_inception(fpath=str(_WEIGHTS.parent))
        digest = _checked()
        extract = build_feature_extractor("clean", device, use_dataparallel=False)
    except UserError:
        raise
    except Exception as error:  # urllib's, OSError, a file that is no TorchScript
        raise MachineError(
            f"--fid-backend clean-fid: expected to load its Inception, but {first_line(error)};"
            f" check the network, or put a whole file at {_WEIGHTS}"
        ) from error
    return CleanFid(extract, device, f"clean-fid {version('clean-fid')}", digest)


def _checked() -> str:
    """Return the digest of the weights.

    Raises UserError for other weights, and for a file that other people may change.
    """
    about = os.lstat(_WEIGHTS)
    mine = not hasattr(os, "getuid") or about.st_uid in (0, os.getuid())
    if not (stat.S_ISREG(about.st_mode) and mine and not about.st_mode & 0o002):
        raise UserError(
            f"--fid-backend clean-fid: expected {_WEIGHTS} to be a file of yours that nobody else"
            " may write, got another one; take it away and run the same command again"
        )
    digest = file_sha256(_WEIGHTS)
    if digest != _SHA256:
        raise UserError(
            f"--fid-backend clean-fid: expected the published Inception at {_WEIGHTS} (sha256"
            f" {_SHA256[:12]}...), got another file ({digest[:12]}...); take it away and run the"
            " same command again"
        )
    return digest
