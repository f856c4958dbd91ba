"""Latents of scenes, encoded once with the embedded model's autoencoder and kept on disk in shards.

A scene is encoded with a margin around the picture. The encoder is a convolution. So each window of
the canvas is the latent of the picture with everything moved by multiples of 4 pixels. One encoding
serves some hundred pictures.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderTiny

from mame_sd.embedded import model as subjects

from . import world
from .loop import mixed_precision

FACTOR = 4  # pixels a side of one latent
MARGIN = 32  # pixels beyond the picture
SHARD = 64  # scenes


def load_autoencoder() -> AutoencoderTiny:
    vae = AutoencoderTiny.from_pretrained(subjects.embedded_model_path() / "vae")
    return vae.eval().requires_grad_(False).to(memory_format=torch.channels_last)


def room(scene: world.Scene) -> list[int]:
    """How many latents the picture may move (left, right, up, down) with every glyph wholly
    inside.
    """
    most = MARGIN // FACTOR
    ends = [
        (p.x - p.size / 2, 1 - p.x - p.size / 2, p.y - p.size / 2, 1 - p.y - p.size / 2)
        for p in scene.placed
    ]
    return [min(most, max(0, int(min(e) * world.SIDE / FACTOR))) for e in zip(*ends, strict=True)]


@dataclass
class Pool:
    """Shards ``folder/kind-00000.npz``, each a function of (seed, kind, index), made when first
    asked for.
    """

    folder: Path
    seed: int
    glyphs: int
    kind: str = "single"  # "single", "pairs" or "held-out"
    size: int = SHARD
    vae: AutoencoderTiny = field(default_factory=load_autoencoder)
    latents: list[torch.Tensor] = field(default_factory=list)
    rooms: list[np.ndarray] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)

    def grow(self, scenes: int) -> None:
        """Hold the first ``scenes`` scenes (whole shards)."""
        while len(self.captions) < scenes:
            self._add(len(self.latents))

    def _add(self, index: int) -> None:
        path = self.folder / f"{self.kind}-{index:05d}.npz"
        if not path.exists():
            self._make(path, index)
        with np.load(path) as shard:
            self.latents.append(torch.from_numpy(shard["latents"]))
            self.rooms.append(shard["rooms"])
            self.captions.extend(str(c) for c in shard["captions"])

    def _make(self, path: Path, index: int) -> None:
        digest = hashlib.sha256(f"{self.seed}/{self.kind}/{index}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
        pairs = 1.0 if self.kind == "pairs" else 0.0
        scenes = [
            world.draw_scene(rng, self.glyphs, pairs, self.kind == "held-out")
            for _ in range(self.size)
        ]
        rows = []
        for start in range(0, len(scenes), 8):
            pixels = np.stack([world.render(s, MARGIN) for s in scenes[start : start + 8]])
            images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
            with torch.no_grad(), mixed_precision():
                rows.append(
                    self.vae.encode(images.to(memory_format=torch.channels_last)).latents.half()
                )
        latents = torch.cat(rows).contiguous() * self.vae.config.scaling_factor
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part.npz")
        np.savez(
            part,
            latents=latents.numpy(),
            rooms=np.array([room(s) for s in scenes]),
            captions=np.array([s.caption for s in scenes]),
        )
        part.replace(path)

    def window(self, index: int, u: float, v: float) -> torch.Tensor:
        """The picture's latents [4, 64, 64] of scene ``index``, moved to the shares ``u`` and ``v``
        of its room.
        """
        canvas, (left, right, up, down) = (
            self.latents[index // self.size][index % self.size],
            self._room(index),
        )
        side, middle = world.SIDE // FACTOR, MARGIN // FACTOR
        x = (
            middle - right + int(u * (left + right + 1))
        )  # a window further left: a picture further right
        y = middle - down + int(v * (up + down + 1))
        return canvas[:, y : y + side, x : x + side]

    def _room(self, index: int) -> list[int]:
        row: list[int] = self.rooms[index // self.size][index % self.size].tolist()
        return row
