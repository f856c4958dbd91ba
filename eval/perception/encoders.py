"""Load a vision transformer with its image processor.

It is a folder or hub id in the format of transformers or timm, or an embedded model. Every failure
becomes a UserError that says what was expected, what came and what to do.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mame_sd.errors import UserError, first_line
from mame_sd.perception.encoder_registry import find_encoder
from mame_sd.runs.devices import pick_device, pick_dtype
from mame_sd.runs.model_files import EMBEDDED, ModelChoice, digest_of, find_folder, name_of

from ..networks.pretrained import placed

EMBEDDED_ENCODER = EMBEDDED + "clip"
SMALLEST = 2  # pixels a side
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model")
_TIMM_NAME = re.compile(r"\w+\.\w+")  # such as deit_small_patch16_224.fb_in1k


@dataclass(frozen=True, kw_only=True)
class LoadedEncoder:
    """A model with a vision transformer in eval mode on its device, and what makes its inputs.

    Attributes:
        model: called as those of transformers: with a classifier, with a text half (CLIP, SigLIP),
            or the vision transformer alone.
        tokenizer: the tokenizer of its text half, or None.
        identity: JSON values that identify this model: name, class, a digest of its files, dtype,
            device type.
    """

    model: Any
    processor: Any
    tokenizer: Any
    identity: dict[str, Any]

    @property
    def device(self) -> torch.device:
        """Return the device that the model computes on."""
        return next(iter(self.model.parameters())).device

    @property
    def labels(self) -> dict[str, int]:
        """Return class indices by name; empty without a classifier of images."""
        named = getattr(self.model.config, "label2id", None) or {}
        return {str(name): int(number) for name, number in named.items()} if self.classifies else {}

    @property
    def classifies(self) -> bool:
        """Return True if the model has a classifier of images or videos."""
        name = type(self.model).__name__
        return "ForImageClassification" in name or "ForVideoClassification" in name

    @property
    def frames(self) -> int | None:
        """Return the number of frames of a clip for the model, or None if it takes images."""
        frames = getattr(self.model.config, "num_frames", None)
        return None if frames is None else int(frames)

    @property
    def compares_text(self) -> bool:
        """Return True if the model has a text half to compare images with."""
        halves = ("get_text_features", "get_image_features")
        return all(hasattr(self.model, half) for half in halves)

    def inputs(self, images: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Return the model's arguments for images, on its device, as its processor makes them.

        Args:
            images: images uint8 [H, W, 3], or clips [frames, H, W, 3] for a model of clips.

        Raises:
            UserError: the processor doesn't bring them to one size.
        """
        batch: Any = list(images) if self.frames is None else [list(clip) for clip in images]
        try:
            made = self.processor(batch, return_tensors="pt", input_data_format="channels_last")
        except (ValueError, RuntimeError) as error:
            sizes = sorted({(one.shape[-2], one.shape[-3]) for one in images})
            names = ", ".join(f"{width} x {height}" for width, height in sizes[:3])
            raise UserError(
                f"expected images that the model's processor brings to one size, got {names}"
                f" ({first_line(error)}); give images of one size, or --batch-size 1"
            ) from error
        made.pop("pixel_attention_mask", None)
        return placed(made, self.model)


def check_size(image: np.ndarray, name: str) -> None:
    """Raise UserError if an image or a clip, called `name`, has too few pixels."""
    height, width = image.shape[-3:-1]
    if min(height, width) < SMALLEST:
        raise UserError(
            f"expected images of {SMALLEST} x {SMALLEST} pixels or more, got {name} of"
            f" {width} x {height}; take it out"
        )


def load_encoder(choice: ModelChoice) -> LoadedEncoder:
    """Load a model with a vision transformer that can merge.

    Args:
        choice: its model, dtype, device, revision and offline fields are used. A name of timm with
            its tag means the hub's model of that name.

    Raises:
        UserError: the model or the device is missing, a file can't be read, or no vision
            transformer can merge.
        MachineError: weights could not be fetched.
    """
    device = pick_device(choice.device)
    dtype = pick_dtype(choice.dtype, device)
    name = choice.model or EMBEDDED_ENCODER
    if _TIMM_NAME.fullmatch(name) and not Path(name).exists():
        name = f"timm/{name}"
    folder, name = find_folder(name, partial(_downloaded, choice)), name_of(name)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "architecture" in config:
            model, processor, tokenizer = _of_timm(folder)
        else:
            kind = config["architectures"][0]
            model, processor, tokenizer = _of_transformers(folder, kind, dtype)
    except UserError:
        raise
    except Exception as error:  # a missing file raises OSError, a broken one nearly anything
        raise UserError(
            f"--model {name}: expected a model of transformers with config.json that names its"
            " class in architectures, and preprocessor_config.json (and a tokenizer if it has a"
            f" text half), or one of timm, got {type(error).__name__}: {first_line(error)}; copy"
            " the whole folder from the hub"
        ) from error
    try:
        find_encoder(model)
    except ValueError as error:
        raise UserError(f"--model {name}: {error}") from None
    identity = {
        "name": name,
        "class": type(getattr(model, "timm", model)).__name__,
        "sha256": digest_of(folder),
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
    }
    model = model.eval().requires_grad_(False).to(device, dtype)
    return LoadedEncoder(model=model, processor=processor, tokenizer=tokenizer, identity=identity)


def _downloaded(choice: ModelChoice, name: str) -> str:
    from huggingface_hub import snapshot_download

    where: dict[str, Any] = {"revision": choice.revision, "local_files_only": choice.offline}
    return snapshot_download(name, allow_patterns=list(_FILES), **where)


def _of_transformers(folder: Path, kind: str, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Load model, image processor and tokenizer (None without a text half) of transformers."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    where: dict[str, Any] = {"local_files_only": True}
    model = getattr(transformers, kind).from_pretrained(folder, dtype=dtype, **where)
    processor = transformers.AutoImageProcessor.from_pretrained(folder, **where)
    if not hasattr(model, "get_text_features"):
        return model, processor, None
    return model, processor, transformers.AutoTokenizer.from_pretrained(folder, **where)


class TimmForImageClassification(nn.Module):
    """A classifier of timm with the call of transformers."""

    def __init__(self, model: Any, labels: Sequence[str]) -> None:
        super().__init__()
        self.timm = model
        self.config = SimpleNamespace(label2id={name: n for n, name in enumerate(labels)})

    def forward(self, pixel_values: Tensor) -> Any:
        """Compute logits [B, classes] of pixels [B, 3, H, W]."""
        return SimpleNamespace(logits=self.timm(pixel_values))


def _of_timm(folder: Path) -> tuple[Any, Any, None]:
    """Load model and image processor of timm. Classes without names are called by their index."""
    try:
        import timm
    except ImportError as error:
        raise UserError(
            f"--model {folder}: expected the packages timm and torchvision to load a model of timm,"
            f" but {first_line(error)}; pip install timm"
        ) from error
    from PIL import Image
    from transformers import BitImageProcessor

    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    if not model.num_classes:
        raise UserError(
            f"--model {folder}: expected a classifier of timm, got one without classes; give the"
            " same weights in transformers' format"
        )
    config = model.pretrained_cfg
    labels = config.get("label_names") or range(model.num_classes)
    side, how = config["input_size"][-1], config.get("interpolation", "bicubic")
    edge = math.floor(side / config.get("crop_pct", 0.875))
    processor = BitImageProcessor(
        size={"shortest_edge": edge},
        crop_size={"height": side, "width": side},
        resample=Image.Resampling[how.upper()],
        image_mean=list(config["mean"]),
        image_std=list(config["std"]),
    )
    return TimmForImageClassification(model, [str(one) for one in labels]), processor, None
