"""Score captions against references by pycocoevalcap: BLEU-1 to 4, ROUGE-L and CIDEr.

pycocoevalcap's tokenizer is a Java program. `tokens` replaces it: lower case, words with their
inner hyphens, apostrophes and dots, without punctuation. Unlike it, it doesn't split "don't".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mame_sd.errors import UserError

SCORES = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L", "CIDEr")
_WORD = re.compile(r"[^\W_]+(?:[-'.][^\W_]+)*")


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
    bleu: Any = Bleu(4).compute_score(expected, made, verbose=0)[0]
    rouge, cider = (
        Rouge().compute_score(expected, made)[0],
        Cider().compute_score(expected, made)[0],
    )
    return dict(zip(SCORES, (*map(float, bleu), float(rouge), float(cider)), strict=True))
