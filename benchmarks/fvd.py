"""Frechet distance between two folders of clips, by the logits of I3D (FVD).

    python -m benchmarks.fvd out/merged out/plain
    python -m benchmarks.fvd out/merged kinetics/clips --frames 32

A clip is a folder of frames; its first ones are taken. Frames are resized as images are for FID, so
a figure is comparable with figures of this command alone. Few clips bias it upward.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from mame_sd.errors import UserError
from mame_sd.eval.frames import frames_in
from mame_sd.eval.images import load_image
from mame_sd.eval.metrics.frechet import frechet_distance, statistics
from mame_sd.eval.networks.i3d import features
from mame_sd.eval.weights.load import load


def clips(folder: Path, frames: int) -> list[np.ndarray]:
    """Each clip of `folder` as uint8 [frames, H, W, 3].

    Raises UserError for fewer than two clips, or a clip of fewer frames.
    """
    found = []
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = frames_in(place)[:frames]
        if len(files) < frames:
            raise UserError(f"{place}: expected {frames} frames, got {len(files)}; give --frames")
        found.append(np.stack([load_image(file, convert=True) for file in files]))
    if len(found) < 2:
        raise UserError(f"{folder}: expected at least 2 folders of frames, got {len(found)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs=2, type=Path, help="folders of clips")
    parser.add_argument("--frames", type=int, default=16, help="frames of each clip")
    parser.add_argument("--device", default="cpu", help="where I3D runs")
    parser.add_argument("--offline", action="store_true", help="take weights that are here")
    given = parser.parse_args()
    tensors = load("i3d-kinetics-400", offline=given.offline)
    sets = [
        statistics(features(tensors, clips(folder, given.frames), given.device), "I3D")
        for folder in given.folders
    ]
    counts = " and ".join(str(one.n) for one in sets)
    print(f"FVD {frechet_distance(*sets):.2f} ({counts} clips of {given.frames} frames)")


if __name__ == "__main__":
    main()
