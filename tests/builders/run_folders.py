"""Run folders of given pixels, without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mame_sd.runs.records import FORMAT


def write_run(
    folder: Path,
    images: dict[str, np.ndarray],
    prompts: dict[str, str] | None = None,
    torch: str = "",
    **settings: Any,
) -> Path:
    """Write a run folder as `generate` leaves it, of given pixels by key `<id>_<repeat>`."""
    (folder / "images").mkdir(parents=True)
    rows = []
    for key, pixels in images.items():
        identity, _, repeat = key.rpartition("_")
        file = f"images/{key}.png"
        Image.fromarray(pixels).save(folder / file)
        row = {"name": key, "id": identity, "repeat": int(repeat), "file": file, "seed": 0}
        row |= {"width": pixels.shape[1], "height": pixels.shape[0], "seconds": 1.0, "levels": []}
        rows.append({**row, "prompt": (prompts or {}).get(key, f"prompt {identity}")})
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    known = {"prompts": {"count": len(images), "sha256": "x"}, "images_per_prompt": 1, "mame": None}
    manifest = {
        "format": FORMAT,
        "settings": {**known, **settings},
        "environment": {"torch": torch},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def forget_hashes(folder: Path) -> None:
    """Remove the hashes from a run's records, so that a changed image passes for the run's own."""
    path = folder / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row.pop("sha256", None)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def snapshot(folder: Path) -> dict[str, str]:
    """Every file below `folder` as hex, samples.jsonl without its seconds."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if path.name == "samples.jsonl":
            rows = [json.loads(line) for line in data.decode().splitlines()]
            assert all(row.pop("seconds") > 0 for row in rows)
            data = json.dumps(rows).encode()
        found[path.relative_to(folder).as_posix()] = data.hex()
    return found
