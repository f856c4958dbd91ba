"""What a score depends on beside the images: versions, device, attention, the networks behind the metrics."""

from __future__ import annotations

from typing import Any

import torch

from mame_sd.diffusion.apply import denoiser_of
from mame_sd.runs.loading import LoadedModel


def attention_of(model: LoadedModel) -> dict[str, Any]:
    """The denoiser's attention processors and the kernels that PyTorch may take for them."""
    processors = getattr(denoiser_of(model.pipe), "attn_processors", {})
    kernels = {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "memory-efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
    }
    return {
        "processors": ", ".join(sorted({type(processor).__name__ for processor in processors.values()})),
        "kernels allowed": ", ".join(name for name, allowed in kernels.items() if allowed),
    }
