"""The captioner that is measured: a LLaVA in transformers' format, or a mini LLaVA of fetched parts
and a trained projector.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mame_sd.captions.towers import LLAVA, name_of
from mame_sd.embedded.model import models_folder
from mame_sd.errors import UserError, first_line

from ..networks.pretrained import DEVIATION, MEAN, load_dinov2_saliency, load_smollm2

MINI = "captioner.safetensors"  # in a folder: what scripts.training.train_captioner trained
EMBEDDED = "embedded-captioner"  # the name of the one that this project trained
PROMPT = "USER: <image>\nDescribe the image in one sentence. ASSISTANT:"
_IMAGE = "<file_sep>"  # a word of SmolLM2's vocabulary that no text has
_SIDE, _PATCH, _LAYER = 126, 14, -4


@dataclass(frozen=True)
class Captioner:
    """A LLaVA in eval mode, and what makes its inputs and texts.

    Attributes:
        model: of a class that merges.
        inputs: what it is called with for one picture.
        text: of ids that it wrote.
    """

    model: Any
    inputs: Any
    text: Any


def load_captioner(
    name: str, prompt: str | None, weights_dir: Path | None = None, offline: bool = False
) -> Captioner:
    """The captioner of a folder or hub id.

    Raises:
        UserError: it isn't there, or is no LLaVA.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    if name == EMBEDDED and not Path(name).exists():
        name = str(models_folder() / "captioner")
    if (Path(name) / MINI).is_file():
        return _mini(Path(name) / MINI, weights_dir, offline)
    from transformers import AutoModelForImageTextToText, AutoProcessor

    try:
        where: dict[str, Any] = {"local_files_only": offline}
        processor = AutoProcessor.from_pretrained(name, **where)
        model = AutoModelForImageTextToText.from_pretrained(name, dtype="auto", **where)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"--model: expected a LLaVA of transformers, or a folder with {MINI}, got {name}:"
            f" {first_line(error)}"
        ) from error
    if name_of(model) not in LLAVA:
        raise UserError(
            f"--model: expected one of {', '.join(LLAVA)}, got {type(model).__name__}; give another"
        )

    def inputs(picture: Image.Image) -> dict[str, Tensor]:
        made = processor(images=[picture], text=[prompt or PROMPT], return_tensors="pt")
        return {name: value for name, value in made.items() if name != "token_type_ids"}

    def text(ids: Tensor) -> str:
        return str(processor.decode(ids, skip_special_tokens=True)).strip()

    return Captioner(model.eval(), inputs, text)


def _mini(path: Path, weights_dir: Path | None, offline: bool) -> Captioner:
    """DINOv2-S, SmolLM2 and what joins them."""
    language, tokenizer = load_smollm2(weights_dir, offline)
    tower = load_dinov2_saliency(weights_dir, offline).backbone
    image = tokenizer.convert_tokens_to_ids(_IMAGE)
    model = joined(tower, language, path, image)
    head = [image] * (_SIDE // _PATCH) ** 2 + tokenizer("\n")["input_ids"]

    def inputs(picture: Image.Image) -> dict[str, Tensor]:
        ids = torch.tensor([head])
        return {"input_ids": ids, "pixel_values": pixels_of(picture)[None]}

    def text(ids: Tensor) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()

    return Captioner(model, inputs, text)


def pixels_of(picture: Image.Image) -> Tensor:
    """[3, side, side] of a picture as the mini LLaVA's tower takes it."""
    import numpy as np

    small = picture.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)
    x = torch.from_numpy(np.asarray(small, np.float32) / 255).permute(2, 0, 1)
    return (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]


def joined(tower: Any, language: Any, path: Path, image: int) -> Any:
    """A LLaVA of a vision tower, a language model, and the projector and updates in the file
    `path`; `image` is the id of image tokens.

    Raises:
        UserError: the file can't be read, or is of other parts.
    """
    from safetensors.torch import load_file
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=tower.config.to_dict(),
        text_config=language.config.to_dict(),
        image_token_id=image,
        vision_feature_layer=_LAYER,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    model.model.vision_tower = tower
    model.model.language_model = language.model
    model.lm_head = language.lm_head
    model.generation_config = language.generation_config
    try:
        tensors = {name: value.float() for name, value in load_file(path).items()}
        projector = {
            name.removeprefix("projector."): value
            for name, value in tensors.items()
            if name.startswith("projector.")
        }
        model.model.multi_modal_projector.load_state_dict(projector, assign=True)
        for name in {one.rpartition(".")[0] for one in tensors if one.endswith(".up")}:
            weight = model.model.language_model.get_submodule(name).weight
            weight.data += tensors[f"{name}.up"] @ tensors[f"{name}.down"]
    except (OSError, RuntimeError, KeyError, AttributeError) as error:
        raise UserError(
            f"--model: expected a projector and updates for these parts in {path}, got another"
            f" file: {first_line(error)}"
        ) from error
    return model.eval().requires_grad_(False)
