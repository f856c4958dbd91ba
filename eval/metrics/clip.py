"""Compute the CLIP score (Hessel et al., 2021).

Own code, because torchmetrics' CLIPScore (1.9) fails with transformers 5, and cuts long captions
without their end token, so that all of them get similar scores. Here the tokenizer cuts them and
keeps the end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mame_sd.embedded.model import embedded_model_path, embedded_models
from mame_sd.errors import UserError

from ..images import check_images, to_double
from ..metric_list import EMBEDDED_CLIP
from ..networks import full_precision
from ..weights.files import tensors_sha256

# repository and revision at the hub, and whether its weights are in safetensors
PUBLISHED = {
    "clip-vit-b-32": (
        "openai/clip-vit-base-patch32",
        "3d74acf9a28c67741b2f4f2ea7635f0aaf6f0268",
        False,
    ),
    "clip-vit-l-14": (
        "openai/clip-vit-large-patch14",
        "32bd64288804d66eefd0ccbe215aa642df71cc41",
        True,
    ),
}


class Clip:
    """A CLIP model with its image processor and tokenizer.

    Attributes:
        name: "CLIP" and which one.
    """

    def __init__(
        self, name: str, model: Any, images: Any, tokenizer: Any, device: torch.device | str = "cpu"
    ) -> None:
        self.name, self.device = name, torch.device(device)
        self.weights_hash = tensors_sha256(model.state_dict())
        self.model = model.eval().requires_grad_(False).to(self.device)
        self.images, self.tokenizer = images, tokenizer

    def image_features(self, images: Tensor) -> Tensor:
        """Compute unit vectors [n, d] of images [n, 3, H, W] in [0, 1].

        CLIP's own processor resizes and crops them.
        """
        check_images(images)
        pixels = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
        inputs = self.images(
            images=list(pixels), return_tensors="pt", input_data_format="channels_last"
        )
        with full_precision():
            return _unit(
                self.model.get_image_features(pixel_values=inputs["pixel_values"].to(self.device))
            )

    def text_features(self, prompts: Sequence[str]) -> Tensor:
        """Compute unit vectors [n, d] of prompts, or of as much as CLIP reads (77 tokens)."""
        limit = self.model.config.text_config.max_position_embeddings
        inputs = self.tokenizer(
            list(prompts), padding=True, truncation=True, max_length=limit, return_tensors="pt"
        )
        with full_precision():
            return _unit(self.model.get_text_features(**inputs.to(self.device)))


def clip_score(model: Clip, images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Compute 100 * cosine of each image and its prompt, float64 [n], not clamped at 0.

    Args:
        model: a CLIP from `load_clip`.
        images: [n, 3, H, W] in [0, 1].
        prompts: n texts.

    Raises:
        ValueError: there isn't one prompt per image, or values are outside [0, 1] or NaN.
    """
    check_images(images)
    if len(prompts) != len(images):
        raise ValueError(
            f"expected one prompt an image, got {len(prompts)} prompts and {len(images)} images"
        )
    return 100 * (model.image_features(images) * model.text_features(prompts)).sum(1).cpu()


def load_clip(name: str | Path, offline: bool = False, device: torch.device | str = "cpu") -> Clip:
    """Load a CLIP.

    Args:
        name: a name of `PUBLISHED`, "embedded-clip", or a folder that transformers saved.
        offline: if True, nothing is fetched.
        device: where it computes.

    Raises:
        UserError: it is missing while offline, could not be fetched, or is no CLIP.
    """
    from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    place = label = str(name)
    how: dict[str, Any] = {"local_files_only": offline}
    weights: dict[str, Any] = {}
    if place == EMBEDDED_CLIP:
        if "clip" not in embedded_models():
            raise UserError(
                f"--clip {name}: this installation has no embedded CLIP; give the name of another"
                " or a folder"
            )
        place = str(embedded_model_path("clip"))
    elif place in PUBLISHED:
        place, how["revision"], weights["use_safetensors"] = PUBLISHED[place]
    else:
        label = Path(name).name
    try:
        model = CLIPModel.from_pretrained(place, **how, **weights)
        images = CLIPImageProcessorPil.from_pretrained(place, **how)
        tokenizer = CLIPTokenizer.from_pretrained(place, **how)
    except Exception as error:  # a missing file raises OSError, a broken one nearly anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"expected a CLIP model, its tokenizer and preprocessor_config.json in {place}, but"
            f" {reason}; fetch it once without --offline, or copy the whole folder from the hub"
        ) from error
    return Clip(f"CLIP {label}", model, images, tokenizer, device)


def _unit(features: Any) -> Tensor:
    """Normalise the rows of what `get_*_features` returned, float64.

    It returns a tensor, or from transformers 5 on an output that contains one.
    """
    rows = features if isinstance(features, Tensor) else features.pooler_output
    return F.normalize(to_double(rows), dim=-1)
