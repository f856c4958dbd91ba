"""Load a vision transformer in transformers' format, ready to see images: a folder, a hub id, or
the embedded CLIP.

Whatever goes wrong becomes a UserError that says what was expected, what came and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mame_sd.errors import UserError, first_line
from mame_sd.perception.known_encoders import find_encoder
from mame_sd.runs.devices import pick_device, pick_dtype
from mame_sd.runs.model_files import EMBEDDED, ModelChoice, digest_of, find_folder

EMBEDDED_ENCODER = "clip"
SMALLEST = 2  # pixels; of one nothing can be told
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model")


@dataclass(frozen=True, kw_only=True)
class LoadedEncoder:
    """A model with a vision transformer, in eval mode on its device, and what makes its inputs.

    Attributes:
        model: of transformers: with a classifier, with a text half (CLIP, SigLIP), or the vision
            transformer alone.
        processor: its image processor.
        tokenizer: of its text half; None where there is none.
        identity: JSON values that tell this model from others: name, class, a digest of its files,
            dtype, device type.
        embedded: whether it is the embedded one.
    """

    model: Any
    processor: Any
    tokenizer: Any
    identity: dict[str, Any]
    embedded: bool = False

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(iter(self.model.parameters())).device

    @property
    def labels(self) -> dict[str, int]:
        """Names of its classes and their numbers; empty without a classifier of images."""
        named = getattr(self.model.config, "label2id", None) or {}
        return {str(name): int(number) for name, number in named.items()} if self.classifies else {}

    @property
    def classifies(self) -> bool:
        """Whether it has a classifier of images or videos."""
        name = type(self.model).__name__
        return "ForImageClassification" in name or "ForVideoClassification" in name

    @property
    def frames(self) -> int | None:
        """How many frames a clip has that it sees; None: it sees images."""
        found = getattr(self.model.config, "num_frames", None)
        return None if found is None else int(found)

    @property
    def compares_text(self) -> bool:
        """Whether it has a text half to compare images with."""
        return hasattr(self.model, "get_text_features") and hasattr(
            self.model, "get_image_features"
        )

    def inputs(self, images: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """What the model is called with, on its device, as its own processor makes it.

        Images are uint8 [H, W, 3], or clips [frames, H, W, 3] where it sees these.

        Raises UserError for an image that is too small, or images of which it makes several sizes.
        """
        for one in images:
            check_size(one)
        given: Any = list(images) if self.frames is None else [list(clip) for clip in images]
        try:
            made = self.processor(given, return_tensors="pt", input_data_format="channels_last")
        except (ValueError, RuntimeError) as error:
            sizes = sorted({(one.shape[-2], one.shape[-3]) for one in images})
            names = ", ".join(f"{width} x {height}" for width, height in sizes[:3])
            raise UserError(
                f"expected images that the model's processor makes one size of, got {names}"
                f" ({first_line(error)}); give images of one size, or --batch-size 1"
            ) from error
        found = {
            name: value.to(self.device)
            for name, value in made.items()
            if name != "pixel_attention_mask"
        }
        dtype = next(iter(self.model.parameters())).dtype
        return {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in found.items()
        }


def check_size(image: np.ndarray, name: str = "one") -> None:
    """Raises UserError where an image or a clip, called `name`, has too few pixels to see."""
    height, width = image.shape[-3:-1]
    if min(height, width) < SMALLEST:
        raise UserError(
            f"expected images of {SMALLEST} x {SMALLEST} pixels or more, got {name} of"
            f" {width} x {height}; take it out"
        )


def load_encoder(choice: ModelChoice, local_rank: int = 0) -> LoadedEncoder:
    """Load a model with a vision transformer that can merge.

    Args:
        choice: of it model, dtype, device, revision and offline count.
        local_rank: which CUDA device "auto" and "cuda" mean, among several processes on this
            machine.

    Raises:
        UserError: no such model or device, files that can't be read, or no vision transformer that
            can merge.
    """
    import transformers

    folder, name = find_encoder_folder(choice)
    device = pick_device(choice.device, local_rank)
    dtype = pick_dtype(choice.dtype, device)
    kind = _class_named(folder, transformers)
    transformers.utils.logging.disable_progress_bar()
    try:
        model: nn.Module = (
            kind.from_pretrained(folder, local_files_only=True, dtype=dtype)
            .eval()
            .requires_grad_(False)
        )
        processor = transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True)
        text = hasattr(model, "get_text_features")
        tokenizer = (
            transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            if text
            else None
        )
    except Exception as error:  # a missing file raises OSError, a broken one nearly anything
        raise UserError(
            f"--model {name}: expected a model of transformers with preprocessor_config.json (and a"
            f" tokenizer where it has a text half), but {first_line(error)}; copy the whole folder"
            " from the hub"
        ) from error
    try:
        find_encoder(model)
    except ValueError as error:
        raise UserError(f"--model {name}: {error}") from None
    identity = {
        "name": name,
        "class": kind.__name__,
        "sha256": digest_of(folder),
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
    }
    embedded = name == EMBEDDED + EMBEDDED_ENCODER
    return LoadedEncoder(
        model=model.to(device),
        processor=processor,
        tokenizer=tokenizer,
        identity=identity,
        embedded=embedded,
    )


def find_encoder_folder(choice: ModelChoice) -> tuple[Path, str]:
    """The folder that `choice.model` means, downloaded if need be, and a name for it without its
    place.

    Raises UserError when there is none.
    """

    def download(name: str) -> str:
        from huggingface_hub import snapshot_download

        return snapshot_download(
            name,
            revision=choice.revision,
            local_files_only=choice.offline,
            allow_patterns=list(_FILES),
        )

    return find_folder(choice.model or EMBEDDED + EMBEDDED_ENCODER, download)


def _class_named(folder: Path, transformers: Any) -> Any:
    """The class that config.json in `folder` names."""
    try:
        name = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
        return getattr(transformers, name)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"--model {folder}: expected config.json of a model of transformers that names its"
            f" class in architectures, got {type(error).__name__}: {first_line(error)}; give the"
            " folder of a vision transformer, CLIP or SigLIP"
        ) from None
