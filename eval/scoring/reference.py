"""Open the set that quality is measured against: a folder of images, or a run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mame_sd.errors import UserError
from mame_sd.runs.files import shown

from ..images import image_files
from ..metric_list import Metric
from ..weights.files import file_sha256
from .runs import Run


@dataclass(frozen=True, eq=False)
class Reference:
    """A named set of images.

    Attributes:
        digest: sha256 of its content, in any order.
    """

    name: str
    digest: str
    hashes: frozenset[str]
    files: tuple[Path, ...]

    def about(self) -> dict[str, Any]:
        """Return what a manifest says of it."""
        return {"name": self.name, "n": len(self.files), "sha256": self.digest}


def open_reference(path: Path) -> Reference:
    """Open a run folder, or a folder of images (without its subfolders).

    Raises UserError for anything else.
    """
    try:
        run = (path / "manifest.json").is_file()
        files = Run.open(path).files if run else tuple(image_files(path))
    except UserError as error:
        raise UserError(f"--reference: {error}") from error
    hashes = sorted(file_sha256(file) for file in files)
    digest = hashlib.sha256("".join(hashes).encode()).hexdigest()
    name = shown(path.resolve().name)
    return Reference(name, digest, frozenset(hashes), files)


def check_reference(metrics: Sequence[Metric], reference: Reference | None) -> None:
    """Raise UserError if one of `metrics` needs a reference and there is none."""
    needing = [metric.name for metric in metrics if metric.needs == "set"]
    if needing and reference is None:
        raise UserError(
            f"--metrics {','.join(needing)}: expected a --reference to measure quality against, got"
            " none; give a folder of images"
        )


def check_foreign(reference: Reference | None, *runs: Run) -> None:
    """Raise UserError if the reference contains images of a run.

    A distance to these is fidelity, not quality.
    """
    if reference is None:
        return
    for run in runs:
        own = [key for key, item in run.items.items() if file_sha256(item.path) in reference.hashes]
        if own:
            raise UserError(
                f"--reference {reference.name}: expected images of another origin, got {len(own)}"
                f" that are also in {run.folder} ({own[0]}); give other images"
            )
