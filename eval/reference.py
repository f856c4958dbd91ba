"""The reference set that quality is measured against: a folder, a run, a file of statistics, or the rendered glyphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mame_sd.errors import UserError

from .images import image_files, load_image
from .metrics.frechet import Statistics, load_statistics
from .retrieval import Pixels, rendered, subjects_by_caption
from .runs import Run


@dataclass(frozen=True, eq=False)
class Reference:
    """A named set of images, loaded one by one, or its `statistics` alone.

    Attributes:
        count: images in it; 0 where statistics do not say.
        load: pixels [H, W, 3] of the image at an index.
    """

    name: str
    count: int
    load: Callable[[int], Pixels] | None = None
    statistics: Statistics | None = None

    def images(self, metric: str) -> Callable[[int], Pixels]:
        """`load`. Raises UserError when there are only statistics, which `metric` can't do with."""
        if self.load is None:
            raise UserError(f"--reference {self.name}: expected images for {metric}, got statistics; give a folder")
        return self.load


def open_reference(path: Path) -> Reference:
    """The reference at `path`: an .npz of statistics, a run folder, or any folder of images (nothing below it).

    Raises UserError for anything else.
    """
    if path.suffix.lower() == ".npz":
        statistics = load_statistics(path)
        return Reference(path.name, statistics.n, statistics=statistics)
    if (path / "manifest.json").is_file():
        files = [item.path for item in Run.open(path).items.values()]
    else:
        files = image_files(path)
    return Reference(path.resolve().name, len(files), load=lambda index: load_image(files[index]))


def rendered_glyphs() -> Reference:
    """Every glyph of the embedded model on every background."""
    return Reference("rendered glyphs", len(subjects_by_caption()), load=rendered)
