"""Find the models that ship with mame-sd, and draw the pictures they were trained on.

Each of these pictures is an emoji on a plain background (`render`).
"""

import hashlib
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

MODELS = "mame_sd_models"  # the package of the distribution mame-sd-models
GET_THEM = "pip install 'mame-sd[models]', or in a checkout: pip install ./mame_sd/embedded"
BACKGROUNDS = {  # sRGB
    "white": (255, 255, 255),
    "black": (0, 0, 0),
    "gray": (128, 128, 128),
    "red": (214, 40, 40),
    "orange": (247, 140, 30),
    "yellow": (250, 220, 60),
    "green": (46, 160, 67),
    "blue": (37, 78, 219),
    "light blue": (150, 205, 250),
    "purple": (128, 50, 170),
    "pink": (255, 170, 200),
    "brown": (121, 72, 40),
}
HELD_OUT_SHARE = 0.15
DEFAULT_GUIDANCE = {"unet": 1.25, "transformer": 2.5}  # guidance scale by model
DEFAULT_STEPS = 20
_INDEXES = ("model_index.json", "config.json")  # of diffusers' pipelines and transformers' models


@cache
def models_folder() -> Path:
    """Return the folder of the models.

    In a checkout it is the folder of this file, otherwise that of the package mame_sd_models.
    """
    here = Path(__file__).parent
    if _models_in(here):
        return here
    package = find_spec(MODELS)
    places = list(package.submodule_search_locations or []) if package else []
    return Path(places[0]) if places else here


def _models_in(folder: Path) -> list[str]:
    """List the names of the models in `folder`: its folders that a library can load."""
    return sorted(
        path.name for path in folder.iterdir() if any((path / name).is_file() for name in _INDEXES)
    )


def embedded_models() -> list[str]:
    """List the embedded models of this installation.

    The list is empty without the distribution mame-sd-models.
    """
    return _models_in(models_folder())


def embedded_model_path(name: str = "unet") -> Path:
    """Return the folder of an embedded model, for `from_pretrained`.

    Raises:
        FileNotFoundError: this installation has no such model. The message lists those it has.
    """
    names = embedded_models()
    if not names:
        raise FileNotFoundError(f"expected the embedded models, found none; {GET_THEM}")
    if name not in names:
        raise FileNotFoundError(
            f"expected the name of an embedded model ({', '.join(names)}), got {name!r}; give one"
            " of these"
        )
    return models_folder() / name


def caption(name: str, background: str) -> str:
    """Return the prompt for a glyph on a background: "rocket on a light blue background"."""
    article = "an" if background[0] in "aeiou" else "a"
    return f"{name} on {article} {background} background"


def is_held_out(name: str, background: str) -> bool:
    """Return True if the pair was kept out of training.

    A hash of the caption holds out 15 % of all pairs.
    """
    digest = hashlib.sha256(caption(name, background).encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


@cache
def _index() -> dict[str, Any]:
    """Return the contents of the glyph sheet: names, columns, source.

    The sheet is stored with the first model that was trained on it.
    """
    text = (embedded_model_path("unet") / "glyphs.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


@cache
def glyph_names() -> tuple[str, ...]:
    """Return the names of all glyphs, in the order of the glyph sheet."""
    return tuple(_index()["names"])


@cache
def glyphs() -> np.ndarray:
    """Return all glyphs as uint8 RGBA with straight alpha, [number of glyphs, 256, 256, 4]."""
    columns = _index()["columns"]
    sheet = np.asarray(Image.open(embedded_model_path("unet") / "glyphs.webp").convert("RGBA"))
    side = sheet.shape[1] // columns
    rows = sheet.shape[0] // side
    cells = sheet.reshape(rows, side, columns, side, 4).transpose(0, 2, 1, 3, 4)
    return cells.reshape(-1, side, side, 4)[: len(glyph_names())]


def render(name: str, background: str) -> Image.Image:
    """Draw the picture that `caption` describes, 256 x 256.

    Raises:
        ValueError: the glyph or the background is unknown.
    """
    if name not in glyph_names() or background not in BACKGROUNDS:
        raise ValueError(
            f"expected a glyph of glyph_names() and one of {list(BACKGROUNDS)}, got {name!r} on"
            f" {background!r}"
        )
    rgba = glyphs()[glyph_names().index(name)]
    alpha = rgba[..., 3:].astype(np.float32) / 255
    color = np.array(BACKGROUNDS[background], np.float32)
    return Image.fromarray(np.rint(rgba[..., :3] * alpha + color * (1 - alpha)).astype(np.uint8))
