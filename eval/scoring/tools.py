"""Load the networks that scores are computed with, once each and on demand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from mame_sd.errors import MachineError, UserError
from mame_sd.runs.files import check_folder

from ..metric_list import EMBEDDED_CLIP, FID_BACKENDS, Metric
from ..metrics.clip import PUBLISHED, load_clip
from ..metrics.lpips import Lpips
from ..networks.extractors import DinoV2, load_inception
from ..networks.pretrained import SALIENCY, load_dinov2
from ..weights.load import load
from .clean_fid import load_clean_fid

# sets of features kept in memory: a run's, the baseline's and the reference's, with one to spare
REMEMBERED = 4
CLIPS = (*PUBLISHED, EMBEDDED_CLIP)
T = TypeVar("T")


@dataclass
class Tools:
    """How and where metrics are computed.

    Attributes:
        weights_dir: folder that is searched first for weights. If None, the default one.
        offline: if True, nothing is fetched.
        fetch: names of the networks whose weights may be fetched. If None, all.
        clip: name of a CLIP, or a folder that transformers saved.
        fid_backend: what computes FID: "mame-sd" or "clean-fid".
        on_progress: called with the number of images done and of all images.
        networks: the networks loaded so far, by `Metric.network` or "clean-fid"; an exception if
            one can't be had.
    """

    weights_dir: Path | None = None
    offline: bool = False
    fetch: Collection[str] | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    clip: str = CLIPS[0]
    fid_backend: str = FID_BACKENDS[0]
    on_progress: Callable[[int, int], None] = lambda done, total: None
    networks: dict[str, Any] = field(default_factory=dict)
    _remembered: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise UserError for a missing folder of weights, or an unknown CLIP."""
        check_folder("--weights-dir", self.weights_dir)
        if self.clip not in CLIPS and not Path(self.clip).is_dir():
            raise UserError(
                f"--clip: expected {', '.join(CLIPS)} or a folder, got {self.clip!r}; give one of"
                " these"
            )

    def by_clean_fid(self, metric: Metric) -> bool:
        """Return True if clean-fid's code computes `metric`."""
        return self.fid_backend == "clean-fid" and metric.name == "fid"

    def network(self, metric: Metric) -> Any:
        """Return the network of a metric, or None if it needs none.

        Raises UserError or MachineError if its weights can't be had; a second call fails at once.
        """
        name = "clean-fid" if self.by_clean_fid(metric) else metric.network
        if name is None:
            return None
        if name not in self.networks:
            try:
                self.networks[name] = self._load(name)
            except (UserError, MachineError) as error:
                self.networks[name] = error
        if isinstance(self.networks[name], Exception):
            raise self.networks[name]
        return self.networks[name]

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, and keep it for later calls with the same key.

        Only the latest few are kept.
        """
        made: T = self._remembered.pop(key) if key in self._remembered else make()
        while len(self._remembered) >= REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[key] = made
        return made

    def about(self) -> dict[str, dict[str, str]]:
        """Return name, weights' hash and resizing of every network loaded so far."""
        return {
            name: {
                "name": network.name,
                "weights_sha256": network.weights_hash,
                **({"resize": network.resize} if hasattr(network, "resize") else {}),
            }
            for name, network in sorted(self.networks.items())
            if not isinstance(network, Exception)
        }

    def _load(self, name: str) -> Any:
        offline = self.offline or (self.fetch is not None and name not in self.fetch)
        if name == "clean-fid":
            return load_clean_fid(self.device, offline)
        if name == "clip":
            return load_clip(self.clip, offline, self.device)
        if name == Lpips.name:
            return Lpips(load(name, self.weights_dir, offline), self.device)
        if name == SALIENCY:
            return DinoV2(load_dinov2(self.weights_dir, offline), self.device)
        return load_inception(self.weights_dir, offline, self.device)
