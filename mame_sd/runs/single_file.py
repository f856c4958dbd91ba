"""Load a .safetensors checkpoint of Stable Diffusion 1, 2 or XL in its original layout.

Such a file holds weights alone. Configurations, scheduler and tokenizers come from a pipeline of
the same architecture: --single-file-config, or the hub's pipeline that diffusers knows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mame_sd.errors import unexpected
from mame_sd.runs.devices import dtype_argument
from mame_sd.runs.model_files import ModelChoice, check_tokenizers, find_folder

_CLASSES = {
    "v1": "StableDiffusionPipeline",
    "v2": "StableDiffusionPipeline",
    "xl_base": "StableDiffusionXLPipeline",
    "playground-v2-5": "StableDiffusionXLPipeline",
}


def load_single_file(path: Path, choice: ModelChoice, dtype: torch.dtype) -> Any:
    """Return the pipeline of a checkpoint.

    Args:
        path: the file.
        choice: where its configuration is, and whether the hub may be asked.
        dtype: number format of the weights.

    Raises:
        UserError: the file is of another kind or layout, or the configuration isn't there.
        Exception: diffusers' own, if the configuration is of another architecture.
    """
    import diffusers
    from diffusers.loaders.single_file_utils import (
        fetch_diffusers_config,
        infer_diffusers_model_type,
    )
    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        sizes = {key: file.get_slice(key).get_shape() for key in list(file.keys())}
    shapes = {key: torch.empty(size, device="meta") for key, size in sizes.items()}
    kind = "another layout"
    if any(key.startswith("model.diffusion_model.input_blocks.") for key in shapes):
        kind = infer_diffusers_model_type(shapes)
    if kind not in _CLASSES:
        allowed = "a checkpoint of Stable Diffusion 1, 2 or XL in its original layout"
        raise unexpected(f"--model {path}", allowed, kind, "give a diffusers folder instead")

    def download(name: str) -> str:
        files = ["*.json", "*.txt", "*.model"]
        return snapshot_download(name, local_files_only=choice.offline, allow_patterns=files)

    config = choice.single_file_config
    config = config or fetch_diffusers_config(shapes)["pretrained_model_name_or_path"]
    folder = find_folder(config, download, "--single-file-config")
    check_tokenizers(folder, "--single-file-config")
    return getattr(diffusers, _CLASSES[kind]).from_single_file(
        str(path), config=str(folder), **dtype_argument(dtype)
    )
