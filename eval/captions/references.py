"""Read reference captions in COCO's format, and score captions against them.

In the file `images` has ids and files, `annotations` has captions. Scores are BLEU-4, ROUGE-L and
CIDEr by pycocoevalcap, whose tokenizer is a Java program. `tokens` replaces it: lower case,
words with their inner hyphens, apostrophes and dots, without punctuation. Unlike it, it doesn't
split "don't".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mame_sd.errors import UserError, first_line

SCORES = ("BLEU-4", "ROUGE-L", "CIDEr")
_WORD = re.compile(r"[^\W_]+(?:[-'.][^\W_]+)*")


@dataclass(frozen=True)
class Pictures:
    """Pictures in the order of the file of references.

    Attributes:
        files: the file of each picture by its id.
        references: the captions of each picture by its id.
    """

    files: dict[str, Path]
    references: dict[str, list[str]]


def read_references(file: Path, folder: Path, num: int | None = None) -> Pictures:
    """Read the pictures of a folder that a file of references describes.

    Args:
        file: the file of references.
        folder: the folder of pictures.
        num: read only the first `num`.

    Raises:
        UserError: a file is missing or has another format, or a picture has no caption.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        chosen = [(str(one["id"]), str(one["file_name"])) for one in content["images"]][:num]
        captions = [(str(one["image_id"]), str(one["caption"])) for one in content["annotations"]]
    except OSError as error:
        raise UserError(f"--references {file}: {first_line(error)}; check the path") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"--references {file}: expected COCO's format, a JSON object with images (id,"
            f" file_name) and annotations (image_id, caption), got another"
            f" ({type(error).__name__}: {first_line(error)}); correct it"
        ) from error
    files = {name: folder / path for name, path in chosen}
    references: dict[str, list[str]] = {}
    for name, caption in captions:
        references.setdefault(name, []).append(caption)
    for name, path in files.items():
        if not path.is_file():
            raise UserError(f"--data {folder}: expected the picture {path.name}, found none")
        if not references.get(name):
            raise UserError(
                f"--references {file}: expected a caption of each picture, found none of {name}"
            )
    if not files:
        raise UserError(f"--references {file}: expected pictures, found none")
    return Pictures(files, {name: references[name] for name in files})


def tokens(text: str) -> str:
    """Return the words of a caption separated by single spaces.

    >>> tokens("A t-shirt on light blue,  and a CAT.")
    'a t-shirt on light blue and a cat'
    """
    return " ".join(_WORD.findall(text.lower()))


def language_scores(
    captions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Return the scores of all captions together, by name.

    CIDEr weighs words by their frequency in these references.

    Raises:
        UserError: pycocoevalcap is missing.
    """
    try:
        from pycocoevalcap.bleu.bleu import Bleu
        from pycocoevalcap.cider.cider import Cider
        from pycocoevalcap.rouge.rouge import Rouge
    except ImportError as error:
        raise UserError(
            "expected the package pycocoevalcap to score captions; pip install mame-sd[captions]"
        ) from error
    made: dict[str, list[str]] = {name: [tokens(text)] for name, text in captions.items()}
    expected = {name: [tokens(text) for text in references[name]] for name in made}
    bleu: Any = Bleu(4).compute_score(expected, made, verbose=0)[0][3]
    rouge = Rouge().compute_score(expected, made)[0]
    cider = Cider().compute_score(expected, made)[0]
    return dict(zip(SCORES, map(float, (bleu, rouge, cider)), strict=True))
