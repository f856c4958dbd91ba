"""The transformer as a plain StableDiffusion3Pipeline folder, and sheets of what a checkpoint
makes.
"""

import copy
import re
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import StableDiffusion3Pipeline
from diffusers.models.attention_processor import JointAttnProcessor2_0
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from .joint import TEXT_WIDTH, WORDS_WIDTH, Denoiser, Stage, new_scheduler
from .loop import mixed_precision
from .pool import load_autoencoder

PROMPTS = (
    "rocket on a light blue background",
    "red apple on a white background",
    "panda on a green background",
    "cat face on a yellow background",
    "car on a gray striped background",
    "owl on a purple background",
    "pineapple on a red brick background",
    "star on a blue checked background",
    "teddy bear on a pink striped background",
    "t-shirt on a brown brick background",
    "full moon on a black background",
    "frog on an orange checked background",
)
GUIDANCE = 2.5
SAMPLING_STEPS = 20


def new_pipeline(model: Denoiser, tokenizer: CLIPTokenizer) -> StableDiffusion3Pipeline:
    model = copy.deepcopy(model)
    model.transformer.set_attn_processor(JointAttnProcessor2_0())
    pipe = StableDiffusion3Pipeline(
        transformer=model.transformer,
        scheduler=new_scheduler(),
        vae=load_autoencoder(),
        text_encoder=model.text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=model.text_encoder_2,
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@torch.no_grad()
def sample_sheet(path: Path, model: Denoiser, tokenizer: CLIPTokenizer, stage: Stage) -> Path:
    """Two pictures of each prompt; a coarse stage's latents are enlarged before they are
    decoded.
    """
    pipe = new_pipeline(model, tokenizer)
    pipe.scheduler.set_shift(stage.shift)
    rows = []
    for seed in (0, 1):
        latents = torch.stack(
            [
                torch.randn(
                    4,
                    stage.side,
                    stage.side,
                    generator=torch.Generator().manual_seed(100 * seed + i),
                )
                for i in range(len(PROMPTS))
            ]
        )
        with mixed_precision():
            latents = pipe(
                list(PROMPTS),
                latents=latents,
                num_inference_steps=SAMPLING_STEPS,
                guidance_scale=GUIDANCE,
                height=4 * stage.side,
                width=4 * stage.side,
                output_type="latent",
            ).images
            latents = F.interpolate(latents.float(), (64, 64), mode="bilinear")
            images = pipe.vae.decode(latents / pipe.vae.config.scaling_factor).sample.float()
        pixels = images.add(1).mul(127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
        rows += [np.concatenate(list(pixels[i : i + 6]), 1) for i in (0, 6)]
    Image.fromarray(np.concatenate(rows, 0)[::2, ::2]).save(path)
    return path


def blank_t5() -> tuple[T5EncoderModel, T5Tokenizer]:
    """A T5 without layers that says zero to every prompt, as the pipeline does by itself when it
    has none.

    ``from_pretrained`` refuses a folder without one unless it's called with
    ``text_encoder_3=None``.
    """
    blank = T5EncoderModel(
        T5Config(
            vocab_size=3,
            d_model=TEXT_WIDTH + WORDS_WIDTH,
            d_kv=1,
            d_ff=1,
            num_layers=0,
            num_heads=1,
        )
    )
    torch.nn.init.zeros_(blank.shared.weight)
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return blank, T5Tokenizer(vocab=vocabulary, extra_ids=0)


def export(
    out: Path, model: Denoiser, tokenizer: CLIPTokenizer, provenance: dict[str, str]
) -> None:
    """Write the pipeline folder in half precision, provenance in the safetensors metadata."""
    pipe = new_pipeline(model, tokenizer)
    blank, blank_tokenizer = blank_t5()
    pipe.register_modules(text_encoder_3=blank, tokenizer_3=blank_tokenizer)
    pipe.to(dtype=torch.float16).save_pretrained(out)
    # transformers loads in the dtype that stands in the configuration, diffusers in fp32
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        config = out / name / "config.json"
        text = config.read_text(encoding="utf-8").replace(
            '"dtype": "float16"', '"dtype": "float32"'
        )
        config.write_text(text, encoding="utf-8")
    vae = (
        out / "vae" / "config.json"
    )  # it was loaded from a folder of this machine, which diffusers writes down
    vae.write_text(
        re.sub(r'\n *"_name_or_path": "[^"]*",', "", vae.read_text(encoding="utf-8")),
        encoding="utf-8",
    )
    for path in out.rglob("*.safetensors"):
        tensors = {k: v.contiguous() for k, v in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt", **provenance})
