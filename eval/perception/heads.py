"""From a model's output to answers: its classifier's, or the class whose prompts are nearest
(zero-shot).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mame_sd.embedded.model import BACKGROUNDS, caption
from mame_sd.errors import UserError

from .encoders import LoadedEncoder
from .methods import Method

TEMPLATES = ("a photo of a {}.",)
PROMPTS_AT_ONCE = 64


@dataclass(frozen=True)
class Head:
    """Makes logits [B, classes] of a batch.

    Attributes:
        encoder: the model.
        text: unit vectors of the classes [classes, d]; None: the model has its own classifier.
    """

    encoder: LoadedEncoder
    text: Tensor | None = None

    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Of what `LoadedEncoder.inputs` gives; for zero-shot cosines."""
        if self.text is None:
            logits: Tensor = self.encoder.model(**inputs).logits
            return logits
        return unit(self.encoder.model.get_image_features(**inputs)) @ self.text.T

    def nearness(self, method: Method, inputs: Mapping[str, Tensor]) -> dict[str, list[float]]:
        """How near features under `method` are to the unmerged model's, by column and image; none
        of a model that answers by a class.
        """
        return {}


def unit(features: Any) -> Tensor:
    """Rows of length 1 of what `get_*_features` gave: a tensor or, from transformers 5 on, an
    output with one inside.
    """
    rows = features if isinstance(features, Tensor) else features.pooler_output
    return F.normalize(rows.float(), dim=-1)


@torch.no_grad()
def text_head(encoder: LoadedEncoder, names: Sequence[str], templates: Sequence[str]) -> Head:
    """The zero-shot head: for each class the mean of its prompts' unit vectors, of length 1 again
    (CLIP, section 3.1.4).

    Args:
        encoder: with a text half.
        names: of the classes.
        templates: prompts with {} where the name goes.
    """
    config = encoder.model.config.text_config
    # SigLIP was trained on prompts padded to their full length and reads no mask
    padding: Any = "max_length" if "siglip" in encoder.model.config.model_type else True
    prompts = [template.format(name) for name in names for template in templates]
    rows = []
    for start in range(0, len(prompts), PROMPTS_AT_ONCE):
        chunk = encoder.tokenizer(
            prompts[start : start + PROMPTS_AT_ONCE],
            padding=padding,
            truncation=True,
            max_length=config.max_position_embeddings,
            return_tensors="pt",
        )
        given = {
            name: value.to(encoder.device)
            for name, value in chunk.items()
            if name in ("input_ids", "attention_mask")
        }
        if padding == "max_length":
            given.pop("attention_mask", None)
        rows.append(unit(encoder.model.get_text_features(**given)))
    mean = torch.cat(rows).unflatten(0, (len(names), len(templates))).mean(1)
    return Head(encoder, F.normalize(mean, dim=-1))


def class_names(file: Path | None, folders: Sequence[str]) -> list[str]:
    """Names of the classes, in the order of their folders.

    Args:
        file: a line for each class in the order of the folders, or lines of folder, tab, name;
            None: the folders' names, with spaces for underscores.
        folders: of the classes; empty where images have no labels, which needs a file.

    Raises:
        UserError: a file that can't be read or does not fit the folders.
    """
    if file is None:
        if not folders:
            raise UserError(
                "--classes: expected a file of class names for images without class folders, got"
                " none; give it"
            )
        return [folder.replace("_", " ") for folder in folders]
    lines = read_lines(file, "--classes")
    if all("\t" in line for line in lines):
        named = dict(line.split("\t", 1) for line in lines)
        missing = [folder for folder in folders if folder not in named]
        if missing:
            raise UserError(
                f"--classes {file}: expected a name for each class folder, got none for"
                f" {missing[0]!r}; add it"
            )
        return [named[folder] for folder in folders] if folders else list(named.values())
    if folders and len(lines) != len(folders):
        raise UserError(
            f"--classes {file}: expected a line for each of {len(folders)} class folders, got"
            f" {len(lines)}; write folder, tab, name in each line, or as many lines"
        )
    return lines


def prompt_templates(file: Path | None, encoder: LoadedEncoder) -> list[str]:
    """Prompt templates of `file`, one a line; None: the captions that the embedded model was
    trained on, CLIP's plain one elsewhere.

    Raises UserError for a file that can't be read, or a line without {}.
    """
    if file is None:
        return (
            [caption("{}", color) for color in BACKGROUNDS] if encoder.embedded else list(TEMPLATES)
        )
    lines = read_lines(file, "--templates")
    for line in lines:
        if line.count("{}") != 1 or line.count("{") != 1 or line.count("}") != 1:
            raise UserError(
                f"--templates {file}: expected {{}} once in each line, got {line!r}; write where"
                " the name goes"
            )
    return lines


def read_lines(file: Path, flag: str) -> list[str]:
    """The lines of a text file that are not empty.

    Raises UserError, naming `flag`, where there are none.
    """
    try:
        lines = [
            line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{flag} {file}: expected a text file, but it can't be read ({error}); check the path"
        ) from None
    if not lines:
        raise UserError(f"{flag} {file}: expected lines of text, got none; write one for each")
    return lines
