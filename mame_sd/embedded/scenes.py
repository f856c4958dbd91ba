"""What the embedded transformer was trained to draw: a subject at a free place, size and angle, on
a ground with a free pattern.

The prompt names subject, colour and texture (``rocket on a red brick background``). Place, size,
angle and the pattern's period and phase stand nowhere, so that no single picture is the truth;
`nearest_subject` looks for the subject everywhere.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from . import model

_NAMES = """
rocket, red apple, cat face, star, red heart, pizza, tree, balloon, basketball, soccer
ball, teddy bear, butterfly, cactus, crab, elephant, fish, fox, frog, honeybee, lion,
owl, panda, penguin, pig face, sunflower, whale, banana, birthday cake, carrot,
hamburger, ice cream, pineapple, strawberry, watermelon, car, sailboat, umbrella, full
moon, t-shirt, house
"""
SUBJECTS = tuple(name.strip() for name in _NAMES.replace("\n", " ").split(", "))
TEXTURES = ("", "striped", "checked", "brick")
SMALLEST, LARGEST = 0.5, 0.9  # side of the subject's cell, in shares of the picture's

_SIDE = 64  # pixels that subjects are looked for in
_SIZES = tuple(round(_SIDE * size) for size in np.geomspace(SMALLEST, LARGEST, 7))
_ANGLES = (-10, -5, 0, 5, 10)  # degrees


def ground_phrases() -> list[str]:
    """Every ground that a prompt may name: a colour, or a colour and a texture."""
    return [f"{color} {texture}".strip() for texture in TEXTURES for color in model.BACKGROUNDS]


@cache
def scenes_by_caption() -> dict[str, tuple[str, str]]:
    """(subject, ground) of every prompt that the transformer was made for."""
    pairs = ((name, ground) for name in SUBJECTS for ground in ground_phrases())
    return {model.caption(*pair): pair for pair in pairs}


def color_of(ground: str) -> str:
    """The colour that a ground names.

    >>> color_of("light blue brick")
    'light blue'
    """
    words = ground.split()
    return " ".join(words[:-1] if words[-1] in TEXTURES else words)


@cache
def _templates() -> tuple[
    NDArray[np.complex64], NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]
]:
    """Tables over every subject, size and angle. The first has spectra of alpha * red, green, blue
    and of alpha alone [n, 4, ...]. Then come the sums of alpha * colour^2 [n] and of alpha [n]. The
    last says where its corner may lie [n, side, side].
    """
    glyphs = model.glyphs()
    laid, inside = [], []
    for name in SUBJECTS:
        glyph = Image.fromarray(glyphs[model.glyph_names().index(name)], "RGBA")
        for size in _SIZES:
            upright = glyph.resize((size, size), Image.Resampling.LANCZOS)
            for angle in _ANGLES:
                cell = upright.rotate(-angle, Image.Resampling.BICUBIC)
                canvas = np.zeros((_SIDE, _SIDE, 4), np.float32)
                canvas[:size, :size] = np.asarray(cell, np.float32) / 255
                laid.append(canvas)
                allowed = np.zeros((_SIDE, _SIDE), bool)
                allowed[: _SIDE - size + 1, : _SIDE - size + 1] = True
                inside.append(allowed)
    rgba = np.stack(laid).transpose(0, 3, 1, 2)
    alpha = rgba[:, 3]
    squares = (alpha[:, None] * rgba[:, :3] ** 2).sum((1, 2, 3))
    spectra = np.fft.rfft2(np.concatenate([rgba[:, :3] * alpha[:, None], alpha[:, None]], 1)).conj()
    return spectra.astype(np.complex64), squares, alpha.sum((1, 2)), np.stack(inside)


def nearest_subject(image: Image.Image, ground: str) -> str:
    """Name of the subject that explains most of ``image`` on a plain ground of that colour,
    wherever and however large it is.

    That is the one whose best placing, laid over the ground's colour, has the lowest squared error
    to the image.
    """
    spectra, squares, areas, inside = _templates()
    small = image.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BOX)
    pixels = np.asarray(small, np.float32).transpose(2, 0, 1) / 255
    color = np.array(model.BACKGROUNDS[color_of(ground)], np.float32) / 255
    # sum of alpha ((image - glyph)^2 - (image - ground)^2): what the glyph explains better than the
    # ground does
    seen = np.fft.rfft2(
        np.concatenate([pixels, -(color[:, None, None] * pixels).sum(0, keepdims=True)])
    )
    gain = np.fft.irfft2((spectra * seen.astype(np.complex64)).sum(1), (_SIDE, _SIDE))
    error = (squares - (color**2).sum() * areas)[:, None, None] - 2 * gain
    best = int(np.where(inside, error, np.inf).min((1, 2)).argmin())
    return SUBJECTS[best // (len(_SIZES) * len(_ANGLES))]
