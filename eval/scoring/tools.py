"""What scores are computed with: networks, loaded once and only when asked for, on one device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from mame_sd.errors import MachineError, UserError

from ..metric_list import EMBEDDED_CLIP, FID_BACKENDS, Metric
from ..metrics.clip import load_clip
from ..metrics.lpips import load_lpips
from ..networks.extractors import load_dinov2_extractor, load_inception
from ..networks.pretrained import SALIENCY
from ..weights.load import check_folder
from ..weights.registry import REGISTRY
from .clean_fid import load_clean_fid

# sets of features kept in memory: a run's, the baseline's and the reference's, with one to spare
REMEMBERED = 4
CLIPS = (*(name for name in REGISTRY if name.startswith("clip-")), EMBEDDED_CLIP)
T = TypeVar("T")


@dataclass
class Tools:
    """How and where metrics are computed.

    Attributes:
        weights_dir: folder to look for weights in first; None: the default one.
        offline: never ask a network for weights.
        fetch: names of the networks whose weights may be fetched; None: all.
        clip: name of a CLIP, or a folder with one as transformers saves it.
        fid_backend: whose code computes FID: "mame-sd" or "clean-fid".
        on_progress: told (images done, images in all).
        networks: those loaded so far, by the name that `Metric` has, or "clean-fid"; an exception
            where one can't be had.
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
        """Raises UserError for a folder of weights that is none, a CLIP that is neither known nor a
        folder, or an unknown backend.
        """
        check_folder(self.weights_dir)
        if self.clip not in CLIPS and not Path(self.clip).is_dir():
            raise UserError(
                f"--clip: expected {', '.join(CLIPS)} or a folder, got {self.clip!r}; give one of"
                " these"
            )
        if self.fid_backend not in FID_BACKENDS:
            raise UserError(
                f"--fid-backend: expected {' or '.join(FID_BACKENDS)}, got {self.fid_backend!r};"
                " give one of these"
            )

    def by_clean_fid(self, metric: Metric) -> bool:
        """Whether clean-fid's code computes `metric`."""
        return self.fid_backend == "clean-fid" and metric.name in ("fid", "fid_to_baseline")

    def network(self, metric: Metric) -> Any:
        """The network behind `metric`; None where it needs none.

        Raises UserError or MachineError when its weights can't be had, each time at once.
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
        """`make()`, kept for the next times that `key` is asked for; only the latest few are."""
        found: T = self._remembered.pop(key) if key in self._remembered else make()
        while len(self._remembered) >= REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[key] = found
        return found

    def about(self) -> dict[str, dict[str, str]]:
        """Name, weights' hash and resizing of every network loaded so far."""
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
            return load_clip(self.clip, self.weights_dir, offline, self.device)
        if name.startswith("lpips-"):
            net = name.removeprefix("lpips-")
            return load_lpips(net, self.weights_dir, offline, self.device)
        if name == SALIENCY:
            return load_dinov2_extractor(self.weights_dir, offline, self.device)
        return load_inception(self.weights_dir, offline, self.device)
