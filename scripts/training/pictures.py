"""Pictures to recognise: one of 180 glyphs in a scene, smaller, rotated further and partly hidden.

In a crowded picture the glyph is large, and pieces of other glyphs are strewn over everything: few
tokens are redundant, and the answer has to be put together from what remains visible.

A picture follows from (seed, kind, index) only. Pairs of glyph and background that are held out are
never trained on; the model is measured on them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mame_sd.embedded import model as subjects
from scripts.training import world

SMALLEST, LARGEST = 0.3, 0.6  # side of the glyph's cell, in shares of the picture's
TURN = 12.0  # degrees, standard deviation of its angle
HIDDEN = 0.3  # share of pictures in which something lies before the glyph
COVER = (0.25, 0.5)  # side of what lies there, in shares of the glyph's cell
CROWD = (50, 80)  # pieces in a crowded picture
CROWDED = (0.6, 0.95)  # side of its glyph's cell, in shares of the picture's
PIECE = (0.1, 0.25)  # side of a piece's whole glyph, in shares of the picture's
NOISE = 12.0  # levels of 255, the largest standard deviation of the pixels' noise


def rng_of(seed: int, kind: str, index: int) -> np.random.Generator:
    """Return the random generator of a picture."""
    digest = hashlib.sha256(f"{seed}/{kind}/{index}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def draw(
    rng: np.random.Generator,
    names: Sequence[str],
    held_out: bool = False,
    grounds: Sequence[str] = (),
    crowd: tuple[int, int] | None = None,
) -> tuple[np.ndarray, world.Scene]:
    """Draw a picture, uint8 [side, side, 3], and what it shows.

    Args:
        rng: The random generator.
        names: Names of the glyphs to choose from.
        held_out: Draw held-out pairs instead of trained ones.
        grounds: Backgrounds to choose from; all if empty.
        crowd: Smallest and largest number of pieces of other glyphs, or None.
    """
    scene = world.draw_scene(rng, len(names), held_out=held_out, names=names, grounds=grounds)
    size = float(np.exp(rng.uniform(*np.log(CROWDED if crowd else (SMALLEST, LARGEST)))))
    x, y = rng.uniform(size / 2, 1 - size / 2, 2)
    angle = float(np.clip(rng.normal(0, TURN), -40, 40))
    scene = replace(scene, subject=replace(scene.subject, size=size, x=x, y=y, angle=angle))
    if crowd:
        count = int(rng.integers(crowd[0], crowd[1] + 1))
        scene = replace(scene, pieces=draw_pieces(rng, scene.subject.glyph, count))
    pixels = world.render(scene).astype(np.float32)
    if not crowd and rng.uniform() < HIDDEN:
        hide(pixels, scene.subject, rng)
    noise = rng.standard_normal(pixels.shape, np.float32)
    pixels = pixels * np.float32(rng.uniform(0.8, 1.2)) + noise * np.float32(rng.uniform(0, NOISE))
    return np.rint(pixels.clip(0, 255)).astype(np.uint8), scene


def draw_pieces(rng: np.random.Generator, shown: int, count: int) -> tuple[world.Piece, ...]:
    """Draw ``count`` pieces of glyphs other than ``shown`` at random places."""
    others = [glyph for glyph in range(len(subjects.glyph_names())) if glyph != shown]
    return tuple(
        world.Piece(
            others[int(rng.integers(len(others)))],
            rng.uniform(*PIECE),
            *rng.uniform(0, 1, 2),
            rng.normal(0, TURN),
            half=int(rng.integers(4)),
        )
        for _ in range(count)
    )


def hide(pixels: np.ndarray, placed: world.Placed, rng: np.random.Generator) -> None:
    """Cover a part of the glyph by an ellipse or a rectangle of one colour, in place."""
    side = world.SIDE
    half = placed.size * rng.uniform(*COVER, 2) / 2 * side
    cx, cy = (np.array([placed.x, placed.y]) + rng.uniform(-0.5, 0.5, 2) * placed.size) * side
    turn, (v, u) = rng.uniform(0, np.pi), np.mgrid[:side, :side] + 0.5
    across = (u - cx) * np.cos(turn) + (v - cy) * np.sin(turn)
    down = (v - cy) * np.cos(turn) - (u - cx) * np.sin(turn)
    a, b = np.abs(across / half[0]), np.abs(down / half[1])
    inside = a**2 + b**2 < 1 if rng.uniform() < 0.5 else np.maximum(a, b) < 1
    pixels[inside] = subjects.BACKGROUNDS[str(rng.choice(list(subjects.BACKGROUNDS)))]
