"""Write the trained parts as a plain StableDiffusionPipeline folder."""

from pathlib import Path

import torch
from diffusers import AutoencoderTiny, StableDiffusionPipeline
from safetensors.torch import load_file, save_file
from transformers import CLIPTokenizer

from .diffusion import Denoiser, new_scheduler


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
    config = (
        out / "text_encoder" / "config.json"
    )  # transformers loads in the dtype that stands here, diffusers in fp32
    config.write_text(
        config.read_text(encoding="utf-8").replace('"dtype": "float16"', '"dtype": "float32"'),
        encoding="utf-8",
    )
    for path in out.rglob("*.safetensors"):
        tensors = {k: v.contiguous() for k, v in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt", **provenance})
