"""Weights that mean nothing, and a registry that trusts them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file

from mame_sd.eval.weights.files import file_sha256
from mame_sd.eval.weights.registry import REGISTRY, Weights
from tests.builders import seeded
from tests.builders.tiny import save_tiny_clip

ORACLES = Path(__file__).parents[1] / "oracles" / "eval.json"


def save_seeded_weights(folder: Path) -> Path:
    """LPIPS (alex) at its true size and a small CLIP, with weights that mean nothing."""
    shapes = json.loads(ORACLES.read_text())["lpips"]["alex"]["shapes"]
    save_file(
        seeded.weights({name: tuple(shape) for name, shape in shapes.items()}),
        folder / "lpips-alex.safetensors",
    )
    save_tiny_clip(folder / "clip-vit-base-patch32")
    return folder


def trusted(folder: Path) -> dict[str, Weights]:
    """The registry's entries of the files that lie in `folder`, with these files' own sha256."""
    found = {}
    for name, entry in REGISTRY.items():
        here = [source for source in entry.sources if (folder / source.file).is_file()]
        if here:
            sources = tuple(
                replace(source, sha256=file_sha256(folder / source.file)) for source in here
            )
            found[name] = replace(entry, sources=sources)
    return found
