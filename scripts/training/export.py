"""Write the trained parts as a plain StableDiffusionPipeline folder."""

from pathlib import Path

import torch
from diffusers import AutoencoderTiny, StableDiffusionPipeline
from transformers import CLIPTokenizer

from .diffusion import Denoiser, new_scheduler
from .loop import save_exported


def export(
    out: Path,
    vae: AutoencoderTiny,
    model: Denoiser,
    tokenizer: CLIPTokenizer,
    latents: dict,
    provenance: dict[str, str],
) -> None:
    """Write a plain StableDiffusionPipeline folder in half precision, provenance in the safetensors
    metadata.
    """
    vae.register_to_config(scaling_factor=latents["scale"])
    pipe = StableDiffusionPipeline(
        vae=vae,
        text_encoder=model.text_encoder,
        tokenizer=tokenizer,
        unet=model.unet,
        scheduler=new_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.to(dtype=torch.float16).save_pretrained(out)
    save_exported(out, provenance)
