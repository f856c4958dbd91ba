"""Tiny real diffusers models with random weights: nothing is downloaded and nothing is mocked.

Few of their tokens are similar, so tests lower `tau` and `min_tokens` if something should merge.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    HeunDiscreteScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

LATENT = 16  # side of the default latent: 256 tokens at the first level, 64 at the second
FACTOR = 2  # pixels per latent pixel
TEXT_DIM = 16


def seeded(build: Any, seed: int, *args: Any, **kwargs: Any) -> Any:
    """Return `build(*args, **kwargs)` in eval mode, without touching the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(*args, **kwargs).eval()


def tiny_unet(seed: int = 0, **overrides: Any) -> UNet2DConditionModel:
    """Make a UNet like SD 1.x with two levels, both with self- and cross-attention (10 modules)."""
    config: dict[str, Any] = {
        "sample_size": LATENT,
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "mid_block_type": "UNetMidBlock2DCrossAttn",
        "cross_attention_dim": TEXT_DIM,
        "attention_head_dim": 2,
        "norm_num_groups": 8,
    }
    return seeded(UNet2DConditionModel, seed, **{**config, **overrides})


def one_level_unet(seed: int = 0, **overrides: Any) -> UNet2DConditionModel:
    """`tiny_unet` cut to two layers of 256 tokens, of which a compiler traces less."""
    config: dict[str, Any] = {
        "block_out_channels": (16,),
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("UpBlock2D",),
        "mid_block_type": None,
        "transformer_layers_per_block": 2,
    }
    return tiny_unet(seed, **{**config, **overrides})


def tiny_sdxl_unet(seed: int = 0, **overrides: Any) -> UNet2DConditionModel:
    """Make a UNet like SDXL's, with two attention blocks at the second level only."""
    config: dict[str, Any] = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 6 * 4 + TEXT_DIM,
    }
    return tiny_unet(seed, **{**config, **overrides})


def tiny_vae(seed: int = 1) -> AutoencoderKL:
    """Make an autoencoder of factor 2, with a 4-D attention that must never be merged."""
    return seeded(
        AutoencoderKL,
        seed,
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=LATENT * FACTOR,
    )


def tiny_tokenizer() -> CLIPTokenizer:
    """Make a real CLIPTokenizer over single bytes, which takes any string."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = [chr(b) for b in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    tokens = [*characters, *(c + "</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=77)


def tiny_text_encoder(tokenizer: CLIPTokenizer, seed: int = 2) -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_DIM,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return seeded(CLIPTextModel, seed, config)


def tiny_scheduler(name: str = "ddim") -> Any:
    """DDIM or "heun" with Stable Diffusion's noise schedule."""
    schedule = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    if name == "heun":
        return HeunDiscreteScheduler(**schedule, steps_offset=1)
    return DDIMScheduler(**schedule, steps_offset=1, clip_sample=False, set_alpha_to_one=False)


def tiny_components(scheduler: str = "ddim", **unet: Any) -> dict[str, Any]:
    """Everything a Stable Diffusion pipeline's constructor takes."""
    tokenizer = tiny_tokenizer()
    return {
        "vae": tiny_vae(),
        "text_encoder": tiny_text_encoder(tokenizer),
        "tokenizer": tokenizer,
        "unet": tiny_unet(**unet),
        "scheduler": tiny_scheduler(scheduler),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


def tiny_pipeline(scheduler: str = "ddim", **unet: Any) -> StableDiffusionPipeline:
    """Make a pipeline of 32 x 32 pixels: levels of 256 and 64 tokens. `unet` is its config."""
    pipe = StableDiffusionPipeline(**tiny_components(scheduler, **unet))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def save_tiny_pipeline(folder: Path, **unet: Any) -> Path:
    """`tiny_pipeline` saved as a model folder, for `from_pretrained` and `--model`."""
    tiny_pipeline(**unet).save_pretrained(folder)
    return folder


def generate(pipe: Any, prompt: str | list[str] = "a red key", **kwargs: Any) -> torch.Tensor:
    """Return a pipeline's images [B, 3, H, W] in [0, 1]; by default two steps with `seed=0`."""
    call: dict[str, Any] = {"num_inference_steps": 2, "output_type": "pt"}
    generator = torch.Generator().manual_seed(kwargs.pop("seed", 0))
    return pipe(prompt, generator=generator, **{**call, **kwargs}).images


def unet_inputs(
    unet: UNet2DConditionModel,
    batch: int = 2,
    height: int = LATENT,
    width: int = LATENT,
    seed: int = 3,
) -> dict[str, Any]:
    """Return keyword arguments for a call of `unet`, with SDXL's conditions if its config asks."""
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[str, Any] = {
        "sample": torch.randn(batch, 4, height, width, generator=generator),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": torch.randn(batch, 7, TEXT_DIM, generator=generator),
    }
    if unet.config.get("addition_embed_type") == "text_time":
        inputs["added_cond_kwargs"] = {
            "text_embeds": torch.randn(batch, TEXT_DIM, generator=generator),
            "time_ids": torch.ones(batch, 6),
        }
    return inputs


def gligen_inputs(unet: UNet2DConditionModel) -> dict[str, Any]:
    """Return `unet_inputs` with three boxes for a gated self-attention."""
    generator = torch.Generator().manual_seed(0)
    boxes = {
        "boxes": torch.rand(2, 3, 4, generator=generator),
        "positive_embeddings": torch.randn(2, 3, 16, generator=generator),
        "masks": torch.ones(2, 3),
    }
    return {**unet_inputs(unet), "cross_attention_kwargs": {"gligen": boxes}}


def run_unet(unet: UNet2DConditionModel, **kwargs: Any) -> torch.Tensor:
    """Return the UNet's output [B, 4, height, width] for `unet_inputs(unet, **kwargs)`."""
    with torch.no_grad():
        return unet(**unet_inputs(unet, **kwargs)).sample


def save_tiny_clip(folder: Path) -> Path:
    """Save a small CLIP with random weights in the files in which the hub has OpenAI's."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

    tokenizer = tiny_tokenizer()
    text = tiny_text_encoder(tokenizer).config.to_dict()
    vision = {
        **{key: text[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")},
        "num_hidden_layers": 1,
        "image_size": 32,
        "patch_size": 8,
    }
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    model = seeded(CLIPModel, 0, config)
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    tokenizer.save_pretrained(folder)
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    CLIPImageProcessorPil(**size).save_pretrained(folder)
    return folder
