"""A world in which the tokens of a picture need one another: a glyph on a patterned background.

The caption names the glyph, the colour and the kind of the background: ``rocket on a red brick
background``. It doesn't say a glyph's place, size and angle, nor a background's period, phase,
direction and second colour. A denoiser's tokens have to agree on them. A scene follows from a
random generator only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

from mame_sd.embedded import model as subjects
from mame_sd.embedded.scenes import LARGEST, SMALLEST, SUBJECTS, TEXTURES, ground_phrases

SIDE = 256
TEXTURE_SHARES = (0.46, 0.18, 0.18, 0.18)
NAMED_SHARE = 0.62  # of the width of stripes and checks: the colour in the caption has the majority


@dataclass(frozen=True)
class Placed:
    """A glyph in the picture.

    Side of its cell and place of its centre are shares of the picture's side; the angle is in
    degrees.
    """

    glyph: int
    size: float
    x: float
    y: float
    angle: float


@dataclass(frozen=True)
class Piece(Placed):
    """One half of a glyph, cut straight through its middle: top, bottom, left or right."""

    half: int


@dataclass(frozen=True)
class Ground:
    """A background: kind, colours, and a free pattern."""

    color: str
    texture: str
    second: tuple[float, float, float]  # sRGB of stripes, checks or mortar
    period: float  # pixels
    phase: tuple[float, float]  # in periods
    angle: float  # degrees, of stripes and checks

    @property
    def phrase(self) -> str:
        return f"{self.color} {self.texture}".strip()


@dataclass(frozen=True)
class Scene:
    """A glyph on a background, which the caption names, and pieces of others, which it doesn't."""

    subject: Placed
    ground: Ground
    pieces: tuple[Piece, ...] = ()

    @property
    def name(self) -> str:
        return subjects.glyph_names()[self.subject.glyph]

    @property
    def caption(self) -> str:
        return subjects.caption(self.name, self.ground.phrase)

    @property
    def held_out(self) -> bool:
        return subjects.is_held_out(self.name, self.ground.phrase)


def all_captions() -> list[str]:
    """Return every caption, and one with "and", which is a word of the embedded tokenizer."""
    captions = [
        subjects.caption(name, phrase)
        for name in subjects.glyph_names()
        for phrase in ground_phrases()
    ]
    return [*captions, subjects.caption(" and ".join(subjects.glyph_names()[:2]), "white")]


def draw_ground(rng: np.random.Generator) -> Ground:
    """Draw a background."""
    color = str(rng.choice(list(subjects.BACKGROUNDS)))
    texture = str(rng.choice(TEXTURES, p=TEXTURE_SHARES))
    named = np.array(subjects.BACKGROUNDS[color], np.float64)
    towards = {"white": 0.0, "black": 255.0}.get(color, 255.0 * rng.integers(2))
    second = named + (towards - named) * rng.uniform(0.25, 0.45)
    turn = (
        float(rng.choice([0, 45, 90, 135]))
        if texture == "striped"
        else float(rng.choice([0, 0, 45]))
    )
    return Ground(
        color,
        texture,
        tuple(second.tolist()),
        rng.uniform(36, 88),
        (rng.uniform(), rng.uniform()),
        turn + rng.uniform(-6, 6),
    )


def draw_scene(
    rng: np.random.Generator,
    glyphs: int,
    held_out: bool = False,
    names: Sequence[str] = SUBJECTS,
    grounds: Sequence[str] = (),
) -> Scene:
    """Draw a scene.

    Args:
        rng: The random generator.
        glyphs: The scene shows one of the first `glyphs` of `names`.
        held_out: Draw held-out pairs instead of trained ones.
        names: Names of the glyphs to choose from.
        grounds: Backgrounds to choose from; all if empty.
    """
    while True:
        rng.uniform()  # decides nothing; without it other scenes would follow than were trained on
        size = rng.uniform(SMALLEST, LARGEST)
        x, y = rng.uniform(size / 2, 1 - size / 2, 2)
        glyph = subjects.glyph_names().index(names[int(rng.integers(glyphs))])
        angle = float(np.clip(rng.normal(0, 7), -15, 15))
        scene = Scene(Placed(glyph, size, x, y, angle), draw_ground(rng))
        if scene.held_out == held_out and (not grounds or scene.ground.phrase in grounds):
            return scene


def wave(u: np.ndarray, period: float, phase: float) -> np.ndarray:
    """Return a square wave with soft edges: 0 over a share of each period, 1 otherwise."""
    distance = np.abs((u / period + phase) % 1 - 0.5) - NAMED_SHARE / 2
    return np.clip(distance * period + 0.5, 0, 1)


def paint_ground(ground: Ground, margin: int) -> np.ndarray:
    """Paint a background on a canvas ``margin`` pixels larger than the picture on each side.

    Returns [side, side, 3] float32 in 0..255.
    """
    at = np.arange(-margin, SIDE + margin, dtype=np.float64) + 0.5
    x, y = at[None, :], at[:, None]
    turn = np.deg2rad(ground.angle)
    u, v = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    if ground.texture == "striped":
        mask = wave(u, ground.period, ground.phase[0])
    elif ground.texture == "checked":
        a, b = wave(u, ground.period, ground.phase[0]), wave(v, ground.period, ground.phase[1])
        mask = np.maximum(a, b)
    elif ground.texture == "brick":
        height, mortar = ground.period / 2, max(4.0, ground.period / 12)
        row = np.floor(y / height + ground.phase[1])
        across = (x / ground.period + ground.phase[0] + 0.5 * (row % 2)) % 1
        down = (y / height + ground.phase[1]) % 1
        gap = np.minimum(
            np.minimum(across, 1 - across) * ground.period, np.minimum(down, 1 - down) * height
        )
        mask = np.clip(mortar / 2 - gap + 0.5, 0, 1)
    else:
        mask = np.zeros((len(at), len(at)))
    named = np.array(subjects.BACKGROUNDS[ground.color], np.float64)
    mask = np.broadcast_to(mask, (len(at), len(at)))[:, :, None]
    return (named + (np.array(ground.second) - named) * mask).astype(np.float32)


@cache
def glyph_image(glyph: int) -> Image.Image:
    """Return the image of a glyph."""
    return Image.fromarray(subjects.glyphs()[glyph], "RGBA")


def strewn(canvas: np.ndarray, pieces: Sequence[Piece], margin: int) -> np.ndarray:
    """Return the canvas with pieces laid on it, the last one on top."""
    picture = Image.fromarray(np.rint(canvas.clip(0, 255)).astype(np.uint8), "RGB")
    for p in pieces:
        cell = max(8, round(p.size * SIDE))
        image = glyph_image(p.glyph).reduce(2).resize((cell, cell), Image.Resampling.BILINEAR)
        middle = cell // 2
        gone = (
            (0, middle, cell, cell),
            (0, 0, cell, middle),
            (middle, 0, cell, cell),
            (0, 0, middle, cell),
        )[p.half]
        image.paste((0, 0, 0, 0), gone)
        image = image.rotate(-p.angle, Image.Resampling.BILINEAR, expand=True)
        corner = (
            round(p.x * SIDE + margin - image.width / 2),
            round(p.y * SIDE + margin - image.height / 2),
        )
        picture.paste(image, corner, image)
    return np.asarray(picture, np.float32)


def render(scene: Scene, margin: int = 0) -> np.ndarray:
    """Render a scene, uint8 [side, side, 3], with ``margin`` pixels more of it on every side."""
    canvas = paint_ground(scene.ground, margin)
    side, p = canvas.shape[0], scene.subject
    cell = max(8, round(p.size * SIDE))
    small = glyph_image(p.glyph).resize((cell, cell), Image.Resampling.LANCZOS)
    turn = np.deg2rad(p.angle)
    cos, sin = np.cos(turn), np.sin(turn)
    cx, cy = p.x * SIDE + margin, p.y * SIDE + margin
    affine = (
        *(cos, sin, cell / 2 - cos * cx - sin * cy),
        *(-sin, cos, cell / 2 + sin * cx - cos * cy),
    )
    laid = small.transform((side, side), Image.Transform.AFFINE, affine, Image.Resampling.BICUBIC)
    rgba = np.asarray(laid, np.float32)
    alpha = rgba[..., 3:] / 255
    canvas = rgba[..., :3] * alpha + canvas * (1 - alpha)
    if scene.pieces:
        canvas = strewn(canvas, scene.pieces, margin)
    return np.rint(canvas.clip(0, 255)).astype(np.uint8)
