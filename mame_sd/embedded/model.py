"""The models that ship with mame-sd, one folder each, and the ground truth they were trained on:
emoji on plain backgrounds.

Every picture that they learned is a known glyph on a known colour (`render`).
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
DEFAULT_GUIDANCE = {"unet": 1.25, "transformer": 2.5}  # what an embedded model is sampled with
DEFAULT_STEPS = 20
_INDEXES = ("model_index.json", "config.json")  # of diffusers' pipelines; of transformers' models


@cache
def models_folder() -> Path:
    """Where the models lie: beside this file in a checkout, else in the package mame_sd_models."""
    here = Path(__file__).parent
    if _named(here):
        return here
    found = find_spec(MODELS)
    places = list(found.submodule_search_locations or []) if found else []
    return Path(places[0]) if places else here


def _named(folder: Path) -> list[str]:
    """Names of the models in `folder`: a folder in it that a library can load is one."""
    return sorted(
        path.name for path in folder.iterdir() if any((path / name).is_file() for name in _INDEXES)
    )


def embedded_models() -> list[str]:
    """Names of the embedded models of this installation; none without the distribution
    mame-sd-models.
    """
    return _named(models_folder())


def embedded_model_path(name: str = "unet") -> Path:
    """Folder of an embedded model, for ``from_pretrained``; "unet" is a plain
    ``StableDiffusionPipeline``.

    Raises:
        FileNotFoundError: this installation has none of that name; the message lists those it has.
    """
    there = embedded_models()
    if not there:
        raise FileNotFoundError(f"expected the embedded models, found none; {GET_THEM}")
    if name not in there:
        raise FileNotFoundError(
            f"expected the name of an embedded model ({', '.join(there)}), got {name!r}; give one"
            " of these"
        )
    return models_folder() / name


def caption(name: str, background: str) -> str:
    """The prompt that models were trained on, such as ``rocket on a light blue background``."""
    article = "an" if background[0] in "aeiou" else "a"
    return f"{name} on {article} {background} background"


def is_held_out(name: str, background: str) -> bool:
    """Whether the pair was kept out of training (15 % of all pairs, chosen by a hash of the
    caption).
    """
    digest = hashlib.sha256(caption(name, background).encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


@cache
def _index() -> dict[str, Any]:
    """What stands on the glyph sheet, which lies beside the weights that were first trained on it:
    names, columns, source.
    """
    text = (embedded_model_path("unet") / "glyphs.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


@cache
def glyph_names() -> tuple[str, ...]:
    """Names of all glyphs, in the order of the glyph sheet."""
    return tuple(_index()["names"])


@cache
def glyphs() -> np.ndarray:
    """All glyphs as uint8 RGBA, shape [number of glyphs, 256, 256, 4], straight alpha."""
    columns = _index()["columns"]
    sheet = np.asarray(Image.open(embedded_model_path("unet") / "glyphs.webp").convert("RGBA"))
    side = sheet.shape[1] // columns
    rows = sheet.shape[0] // side
    cells = sheet.reshape(rows, side, columns, side, 4).transpose(0, 2, 1, 3, 4)
    return cells.reshape(-1, side, side, 4)[: len(glyph_names())]


def composite(rgba: np.ndarray, background: str) -> np.ndarray:
    """Lay straight-alpha glyphs [..., H, W, 4] (uint8) over a named background: uint8 [..., H, W,
    3].
    """
    alpha = rgba[..., 3:].astype(np.float32) / 255
    color = np.array(BACKGROUNDS[background], np.float32)
    return np.rint(rgba[..., :3] * alpha + color * (1 - alpha)).astype(np.uint8)


def render(name: str, background: str) -> Image.Image:
    """The picture that `caption` asks for: the ground truth, 256 x 256.

    Raises:
        ValueError: unknown glyph or background.
    """
    if name not in glyph_names() or background not in BACKGROUNDS:
        raise ValueError(
            f"expected a glyph of glyph_names() and one of {list(BACKGROUNDS)}, got {name!r} on"
            f" {background!r}"
        )
    return Image.fromarray(composite(glyphs()[glyph_names().index(name)], background))
