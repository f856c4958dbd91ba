"""Latents of scenes, encoded once with the embedded model's autoencoder and stored in shards.

A scene is encoded with a margin around the picture. The encoder is a convolution, so each window of
the canvas is the latent of the picture moved by multiples of 4 pixels. One encoding serves some
hundred pictures.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderTiny

from mame_sd.embedded import model as subjects
from mame_sd.runs.files import written_whole
from scripts.training import world
from scripts.training.loop import mixed_precision
from scripts.training.pictures import rng_of

FACTOR = 4  # pixels a side of one latent
MARGIN = 32  # pixels beyond the picture
SHARD = 64  # scenes


def load_autoencoder() -> AutoencoderTiny:
    """Return the embedded model's autoencoder."""
    vae = AutoencoderTiny.from_pretrained(subjects.embedded_model_path() / "vae")
    return vae.eval().requires_grad_(False).to(memory_format=torch.channels_last)


def room(scene: world.Scene) -> list[int]:
    """Return by how many latents the picture may move left, right, up and down.

    Its glyph stays inside.
    """
    most, p = MARGIN // FACTOR, scene.subject
    ends = (p.x - p.size / 2, 1 - p.x - p.size / 2, p.y - p.size / 2, 1 - p.y - p.size / 2)
    return [min(most, max(0, int(end * world.SIDE / FACTOR))) for end in ends]


@dataclass
class Pool:
    """Shards ``folder/single-00000.npz``, each a function of (seed, number), made on first use."""

    folder: Path
    seed: int
    glyphs: int
    size: int = SHARD
    vae: AutoencoderTiny = field(default_factory=load_autoencoder)
    latents: list[torch.Tensor] = field(default_factory=list)
    rooms: list[np.ndarray] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)

    def grow(self, scenes: int) -> None:
        """Hold the first ``scenes`` scenes (whole shards)."""
        while len(self.captions) < scenes:
            number = len(self.latents)
            path = self.folder / f"single-{number:05d}.npz"
            if not path.exists():
                with written_whole(path) as file:
                    np.savez(file, **self._made(number))
            with np.load(path) as shard:
                self.latents.append(torch.from_numpy(shard["latents"]))
                self.rooms.append(shard["rooms"])
                self.captions.extend(str(c) for c in shard["captions"])

    def _made(self, number: int) -> dict[str, np.ndarray]:
        rng = rng_of(self.seed, "single", number)
        scenes = [world.draw_scene(rng, self.glyphs) for _ in range(self.size)]
        rows = []
        for start in range(0, len(scenes), 8):
            pixels = np.stack([world.render(s, MARGIN) for s in scenes[start : start + 8]])
            images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
            images = images.to(memory_format=torch.channels_last)
            with torch.no_grad(), mixed_precision():
                rows.append(self.vae.encode(images).latents.half())
        latents = torch.cat(rows).contiguous() * self.vae.config.scaling_factor
        return {
            "latents": latents.numpy(),
            "rooms": np.array([room(s) for s in scenes]),
            "captions": np.array([s.caption for s in scenes]),
        }

    def window(self, index: int, u: float, v: float) -> torch.Tensor:
        """Return the latents [4, 64, 64] of scene ``index``, moved within its room.

        Args:
            index: The scene.
            u: Horizontal share of its room.
            v: Vertical share of its room.
        """
        shard, number = divmod(index, self.size)
        left, right, up, down = self.rooms[shard][number].tolist()
        side, middle = world.SIDE // FACTOR, MARGIN // FACTOR
        # A window further left shows the picture further right.
        x = middle - right + int(u * (left + right + 1))
        y = middle - down + int(v * (up + down + 1))
        return self.latents[shard][number][:, y : y + side, x : x + side]
