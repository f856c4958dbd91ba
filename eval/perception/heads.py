"""Turn a model's output into answers: by its classifier, or by the nearest class's prompts."""

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

from .encoders import EMBEDDED_ENCODER, LoadedEncoder

TEMPLATES = ("a photo of a {}.",)
PROMPTS_AT_ONCE = 64


@dataclass(frozen=True)
class Head:
    """Computes logits [B, classes] of a batch.

    Attributes:
        vectors: unit vectors [classes, d] of the classes' prompts. If None, the model has its own
            classifier.
    """

    encoder: LoadedEncoder
    vectors: Tensor | None = None

    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Compute logits of what `LoadedEncoder.inputs` returned; with vectors they are cosines."""
        model = self.encoder.model
        if self.vectors is None:
            logits: Tensor = model(**inputs).logits
            return logits
        return unit(model.get_image_features(**inputs)) @ self.vectors.T


def unit(features: Any) -> Tensor:
    """Normalise the rows that `get_*_features` returned.

    It returns a tensor, or from transformers 5 on an output that contains one.
    """
    rows = features if isinstance(features, Tensor) else features.pooler_output
    return F.normalize(rows.float(), dim=-1)


@torch.no_grad()
def text_head(encoder: LoadedEncoder, names: Sequence[str], templates: Sequence[str]) -> Head:
    """Make the zero-shot head: for each class the normalised mean of its prompts' unit vectors.

    CLIP, section 3.1.4.

    Args:
        encoder: a model with a text half.
        names: names of the classes.
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
        read = ["input_ids", *(["attention_mask"] if padding is True else [])]
        inputs = {name: ids.to(encoder.device) for name, ids in chunk.items() if name in read}
        rows.append(unit(encoder.model.get_text_features(**inputs)))
    return Head(encoder, unit(torch.cat(rows).unflatten(0, (len(names), len(templates))).mean(1)))


def class_names(file: Path | None, folders: Sequence[str]) -> list[str]:
    """Read the names of the classes in the order of their folders.

    Args:
        file: a line for each class in the order of the folders. If None, the folders' names with
            spaces for underscores.
        folders: folders of the classes; empty if images have no labels, which requires a file.

    Raises:
        UserError: the file can't be read or doesn't fit the folders.
    """
    if file is None and not folders:
        raise UserError(
            "--classes: expected a file of class names for images without class folders, got none;"
            " give it"
        )
    if file is None:
        return [folder.replace("_", " ") for folder in folders]
    lines = read_lines(file, "--classes")
    if folders and len(lines) != len(folders):
        raise UserError(
            f"--classes {file}: expected a line for each of {len(folders)} class folders, got"
            f" {len(lines)}; write as many lines"
        )
    return lines


def prompt_templates(file: Path | None, encoder: LoadedEncoder) -> list[str]:
    """Read prompt templates, one per line.

    If `file` is None, the captions that the embedded model was trained on, or CLIP's plain one for
    other models. Raises UserError if the file can't be read, or if a line has no {}.
    """
    if file is None:
        embedded = encoder.identity["name"] == EMBEDDED_ENCODER
        return [caption("{}", color) for color in BACKGROUNDS] if embedded else list(TEMPLATES)
    lines = read_lines(file, "--templates")
    for line in lines:
        if not line.count("{}") == line.count("{") == line.count("}") == 1:
            raise UserError(
                f"--templates {file}: expected {{}} once in each line, got {line!r}; write where"
                " the name goes"
            )
    return lines


def read_lines(file: Path, flag: str) -> list[str]:
    """Read the lines of a text file that are not empty.

    Raises UserError, which names `flag`, if there are none.
    """
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{flag} {file}: expected a text file, but it can't be read ({error}); check the path"
        ) from None
    if not any(lines):
        raise UserError(f"{flag} {file}: expected lines of text, got none; write one for each")
    return [line for line in lines if line]
