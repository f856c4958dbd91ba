"""Per-image scores of one row on disk, valid for exactly the images and the network that they were
computed with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mame_sd.runs.files import write_atomically
from mame_sd.runs.processes import Process

from ..json_text import json_text
from ..metric_list import METRICS, Metric
from .runs import Pair
from .tools import Tools, network_name

FORMAT = "mame-sd scores 1"  # another one, and all is computed again


@dataclass
class ScoreFile:
    """Scores by metric and image key.

    All processes hold the same names; the values are the main process's.
    """

    path: Path
    digest: str
    process: Process
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, pairs: Sequence[Pair], process: Process) -> ScoreFile:
        """What is at `path`, if it is of this version and of these images; else empty, to be
        filled.
        """
        file = cls(path, digest_of(pairs), process)
        try:
            values: Any = json.loads(path.read_text(encoding="utf-8"))
            if (values["format"], values["images"]) == (FORMAT, file.digest):
                file.found = {
                    name: {key: it[key] for key in ("network", "values")}
                    for name, it in values["metrics"].items()
                }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        process.wait()  # nobody writes before everybody has read
        return file

    def get(self, metric: Metric, tools: Tools) -> dict[str, float] | None:
        """The metric's values by key, None where they are still to be computed (with this
        network).
        """
        entry = self.found.get(metric.name)
        if entry is None or entry["network"] != _network_hash(metric, tools):
            return None
        values: dict[str, float] = entry["values"]
        return values

    def put(self, found: Mapping[str, dict[str, float]], tools: Tools) -> None:
        """Add values by metric, and write them down."""
        for name, values in found.items():
            self.found[name] = {"network": _network_hash(METRICS[name], tools), "values": values}
        if self.process.is_main:
            text = json_text({"format": FORMAT, "images": self.digest, "metrics": self.found})
            write_atomically(self.path, text.encode())


def digest_of(pairs: Sequence[Pair]) -> str:
    """SHA-256 over keys and bytes of all images."""
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(pair.key.encode() + b"\0")
        for path in (pair.a, pair.b):
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _network_hash(metric: Metric, tools: Tools) -> str | None:
    return None if network_name(metric) is None else str(tools.network(metric).weights_hash)
