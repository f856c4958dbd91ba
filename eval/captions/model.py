"""Load the captioner that is measured.

It is a LLaVA in transformers' format, or a small LLaVA made of fetched parts and a trained
projector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mame_sd.captions.captioner_registry import LLAVA, name_of
from mame_sd.embedded.model import models_folder
from mame_sd.errors import UserError, first_line
from mame_sd.runs.devices import pick_device, pick_dtype
from mame_sd.runs.model_files import ModelChoice

from ..networks.pretrained import load_dinov2, load_pretrained, load_smollm2, normalised, placed

MINI = "captioner.safetensors"  # in a folder: projector and updates of the mini LLaVA
EMBEDDED = "embedded-captioner"  # the name of the one that this project trained
PROMPT = "USER: <image>\nDescribe the image in one sentence. ASSISTANT:"
_IMAGE = "<file_sep>"  # a word of SmolLM2's vocabulary that no text has
_SIDE, _PATCH, _LAYER = 126, 14, -4


@dataclass(frozen=True)
class Captioner:
    """A LLaVA in eval mode, with functions that make its inputs and texts.

    Attributes:
        model: a model of a registered class.
        inputs: returns the processor's inputs for one picture.
        text: decodes the ids that the model wrote.
    """

    model: Any
    inputs: Callable[[Image.Image], dict[str, Tensor]]
    text: Callable[[Tensor], str]

    @property
    def device(self) -> torch.device:
        """Return the device that the model computes on."""
        return next(iter(self.model.parameters())).device

    def call(self, picture: Image.Image) -> dict[str, Tensor]:
        """Return the model's arguments for one picture, on its device and in its dtype."""
        return placed(self.inputs(picture), self.model)


def load_captioner(choice: ModelChoice, weights_dir: Path | None = None) -> Captioner:
    """Load the captioner of a folder or hub id, on its device.

    Args:
        choice: its model, dtype, device, revision and offline fields are used.
        weights_dir: folder that is searched first for weights of the small LLaVA's parts.

    Raises:
        UserError: the model is missing or isn't a LLaVA, or the device is missing.
    """
    mini = _mini_of(choice)
    device = pick_device(choice.device)
    dtype = pick_dtype(choice.dtype, device)
    captioner = _published(choice, dtype) if mini is None else _mini(mini, weights_dir, choice)
    return replace(captioner, model=captioner.model.eval().requires_grad_(False).to(device, dtype))


def _published(choice: ModelChoice, dtype: torch.dtype) -> Captioner:
    """Load a LLaVA in transformers' format."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    expected = f"a LLaVA of transformers, or a folder with {MINI}"
    named = replace(choice, model=choice.model or EMBEDDED)
    processor, model = load_pretrained(
        named, expected, AutoProcessor, AutoModelForImageTextToText, dtype
    )
    if name_of(model) not in LLAVA:
        raise UserError(
            f"--model: expected one of {', '.join(LLAVA)}, got {type(model).__name__}; give another"
        )

    def inputs(picture: Image.Image) -> dict[str, Tensor]:
        made = processor(images=[picture], text=[PROMPT], return_tensors="pt")
        return {name: value for name, value in made.items() if name != "token_type_ids"}

    return Captioner(model, inputs, lambda ids: _words(processor, ids))


def _mini_of(choice: ModelChoice) -> Path | None:
    """Return the file of a small LLaVA if the model is one, or None."""
    folder = Path(choice.model or EMBEDDED)
    if str(folder) == EMBEDDED and not folder.exists():
        folder = models_folder() / "captioner"
    return folder / MINI if (folder / MINI).is_file() else None


def _mini(path: Path, weights_dir: Path | None, choice: ModelChoice) -> Captioner:
    """Join DINOv2-S, SmolLM2, and the projector and updates of the file `path` to a LLaVA.

    Raises UserError if the file can't be read or belongs to other parts.
    """
    from safetensors.torch import load_file
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    language, tokenizer = load_smollm2(weights_dir, choice.offline)
    tower = load_dinov2(weights_dir, choice.offline)
    image = tokenizer.convert_tokens_to_ids(_IMAGE)
    head = [image] * (_SIDE // _PATCH) ** 2 + tokenizer("\n")["input_ids"]

    def inputs(picture: Image.Image) -> dict[str, Tensor]:
        small = picture.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)
        return {"input_ids": torch.tensor([head]), "pixel_values": normalised(small)}

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
        mark = "projector."
        projector = {n.removeprefix(mark): t for n, t in tensors.items() if n.startswith(mark)}
        model.model.multi_modal_projector.load_state_dict(projector, assign=True)
        for name in {one.rpartition(".")[0] for one in tensors if one.endswith(".up")}:
            weight = model.model.language_model.get_submodule(name).weight
            weight.data += tensors[f"{name}.up"] @ tensors[f"{name}.down"]
    except (OSError, RuntimeError, KeyError, AttributeError) as error:
        raise UserError(
            f"--model: expected a projector and updates for these parts in {path}, got another"
            f" file: {first_line(error)}"
        ) from error
    return Captioner(model, inputs, lambda ids: _words(tokenizer, ids))


def _words(tokenizer: Any, ids: Tensor) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
