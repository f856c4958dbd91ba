"""Clips to recognise: of two glyphs before a ground one moves, and the class says which one and how
("rocket turns").

The other glyph stands still and is of the same kinds. So neither the glyphs of one frame nor the
motion alone tell the class. The camera shakes, the light flickers and every pixel is noisy.

A clip follows from (seed, kind, index) alone. Pairs of glyph and ground that are held out are never
trained on and are what the classifier is measured on.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from mame_sd.embedded import model as subjects
from mame_sd.embedded.scenes import SUBJECTS
from scripts.training import world
from scripts.training.pictures import rng_of

FRAMES, SIDE, MARGIN = 8, 64, 8  # pixels; the ground reaches MARGIN further
NAMES = SUBJECTS[::5]
MOTIONS = ("moves left", "moves right", "moves up", "moves down", "grows", "turns")
CLASSES = tuple(f"{name} {motion}" for name in NAMES for motion in MOTIONS)
SIZE = (0.34, 0.5)  # side of a glyph's cell, in shares of the picture's
WAY = (0.22, 0.4)  # how far it moves
GROWTH = (1.6, 2.4)  # last side over the first
SWEEP = (60.0, 120.0)  # degrees that it turns, either way
SHAKE, FLICKER = 0.8, 0.06  # pixels from frame to frame; of the light
NOISE = 24.0  # levels of 255, the largest standard deviation of the pixels' noise
GROUNDS = 1500
TEXTURE = 40  # pixels of a glyph's cell


@dataclass(frozen=True)
class Clip:
    """What a clip shows.

    Attributes:
        places: [2, FRAMES, 4] centre (x, y) and side in pixels and angle in degrees of the glyph
            that moves and of the one that stands.
        shake: [FRAMES, 2] of the camera, pixels.
    """

    moving: int
    motion: int
    standing: int
    ground: int
    in_front: bool  # the glyph that moves
    places: np.ndarray
    shake: np.ndarray
    light: np.ndarray
    noise: float
    grain: int  # seed of the pixels' noise

    @property
    def label(self) -> int:
        """Its class."""
        return self.moving * len(MOTIONS) + self.motion


@cache
def grounds() -> tuple[list[str], Tensor]:
    """Names of grounds, and their pictures [n, 3, side, side] in 0..255, uint8."""
    names, made = [], []
    for index in range(GROUNDS):
        ground = world.draw_ground(rng_of(0, "clip ground", index))
        factor = world.SIDE // SIDE
        canvas = world.paint_ground(ground, MARGIN * factor)
        side = SIDE + 2 * MARGIN
        made.append(canvas.reshape(side, factor, side, factor, 3).mean((1, 3)))
        names.append(ground.phrase)
    return names, torch.from_numpy(np.rint(np.stack(made))).to(torch.uint8).permute(0, 3, 1, 2)


@cache
def textures() -> Tensor:
    """The glyphs with alpha multiplied in [n, 4, TEXTURE, TEXTURE], in 0..1."""
    every = subjects.glyph_names()
    made = []
    for name in NAMES:
        image = world.glyph_image(every.index(name))
        image = image.resize((TEXTURE, TEXTURE), Image.Resampling.LANCZOS)
        rgba = np.asarray(image, np.float32) / 255
        made.append(np.concatenate([rgba[..., :3] * rgba[..., 3:], rgba[..., 3:]], -1))
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2).contiguous()


def draw(seed: int, kind: str, index: int, held_out: bool = False) -> Clip:
    """The clip of this number."""
    rng = rng_of(seed, f"clip {kind}", index)
    names = grounds()[0]
    moving, standing = rng.choice(len(NAMES), 2, replace=False).tolist()
    motion = int(rng.integers(len(MOTIONS)))
    while True:
        ground = int(rng.integers(len(names)))
        if subjects.is_held_out(NAMES[moving], names[ground]) == held_out:
            break
    time = np.linspace(-0.5, 0.5, FRAMES)
    sizes, way = rng.uniform(*SIZE, 2) * SIDE, rng.uniform(*WAY) * SIDE
    places = np.zeros((2, FRAMES, 4))
    places[..., 2] = sizes[:, None]
    places[..., 3] = np.clip(rng.normal(0, 8, 2), -16, 16)[:, None]
    step = {0: (-1, 0), 1: (1, 0), 2: (0, -1), 3: (0, 1)}.get(motion, (0, 0))
    places[0, :, :2] = time[:, None] * way * np.array(step)
    if MOTIONS[motion] == "grows":
        places[0, :, 2] *= rng.uniform(*GROWTH) ** time
    if MOTIONS[motion] == "turns":
        places[0, :, 3] += time * rng.uniform(*SWEEP) * rng.choice([-1, 1])
    room = places[0, :, 2].max() / 2 + np.abs(places[0, :, :2]).max(0)
    low, high = np.minimum(room, SIDE / 2), np.maximum(SIDE - room, SIDE / 2)
    while True:
        at, other = rng.uniform(low, high), rng.uniform(sizes[1] / 2, SIDE - sizes[1] / 2, 2)
        if np.abs(at - other).max() > 0.3 * sizes.sum():
            break
    places[0, :, :2] += at
    places[1, :, :2] = other
    return Clip(
        moving,
        motion,
        standing,
        ground,
        bool(rng.integers(2)),
        places,
        np.clip(rng.normal(0, SHAKE, (FRAMES, 2)).cumsum(0), 1 - MARGIN, MARGIN - 1),
        rng.uniform(0.8, 1.2) * (1 + rng.normal(0, FLICKER, FRAMES)),
        float(rng.uniform(0, NOISE)),
        int(rng.integers(2**31)),
    )


def _laid(clips: list[Clip], which: int) -> Tensor:
    """Glyphs at their places [B, FRAMES, 4, SIDE, SIDE], alpha multiplied in."""
    place = torch.from_numpy(np.stack([c.places[which] for c in clips])).float()
    shake = torch.from_numpy(np.stack([c.shake for c in clips])).float()
    glyph = textures()[[c.standing if which else c.moving for c in clips]]
    at = torch.arange(SIDE) + 0.5
    x = at[None, None, None, :] - (place[..., 0] + shake[..., 0])[..., None, None]
    y = at[None, None, :, None] - (place[..., 1] + shake[..., 1])[..., None, None]
    turn, half = torch.deg2rad(place[..., 3])[..., None, None], place[..., 2, None, None] / 2
    u, v = (x * turn.cos() + y * turn.sin()) / half, (y * turn.cos() - x * turn.sin()) / half
    grid = torch.stack([u, v], -1).flatten(1, 2)
    laid = F.grid_sample(glyph, grid, mode="bilinear", align_corners=False)
    return laid.unflatten(2, (FRAMES, SIDE)).transpose(1, 2)


def render(clips: list[Clip]) -> tuple[Tensor, Tensor]:
    """Frames [B, FRAMES, 3, SIDE, SIDE] in 0..255, and which glyph each pixel shows.

    The second tensor [B, FRAMES, SIDE, SIDE] is 1 for the glyph that moves, 2 for the one at rest,
    0 for none.
    """
    side = SIDE + 2 * MARGIN
    shake = torch.from_numpy(np.stack([c.shake for c in clips])).float()
    at = torch.arange(SIDE) + 0.5 + MARGIN
    x = (at - shake[..., :1]) * 2 / side - 1
    y = (at - shake[..., 1:]) * 2 / side - 1
    grid = torch.stack(
        [x[:, :, None, :].expand(-1, -1, SIDE, -1), y[:, :, :, None].expand(-1, -1, -1, SIDE)], -1
    )
    ground = grounds()[1][[c.ground for c in clips]].float()
    canvas = F.grid_sample(ground, grid.flatten(1, 2), align_corners=False)
    canvas = canvas.unflatten(2, (FRAMES, SIDE)).transpose(1, 2)
    layers = [_laid(clips, 0), _laid(clips, 1)]
    shown = torch.zeros(len(clips), FRAMES, SIDE, SIDE, dtype=torch.long)
    front = torch.tensor([c.in_front for c in clips])[:, None, None, None]
    for later in (False, True):  # what lies in front comes last
        moving = front == later
        rgba = torch.where(moving[..., None], layers[0], layers[1])
        canvas = canvas * (1 - rgba[:, :, 3:]) + rgba[:, :, :3] * 255
        shown = torch.where(rgba[:, :, 3] > 0.5, torch.where(moving, 1, 2), shown)
    light = torch.from_numpy(np.stack([c.light for c in clips])).float()
    canvas = canvas * light[:, :, None, None, None]
    for one, clip in zip(canvas, clips, strict=True):
        grain = torch.Generator().manual_seed(clip.grain)
        one += torch.randn(one.shape, generator=grain) * clip.noise
    return canvas.clamp(0, 255), shown
