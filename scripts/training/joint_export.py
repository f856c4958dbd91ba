"""The transformer as a plain StableDiffusion3Pipeline folder."""

import copy
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.models.attention_processor import JointAttnProcessor2_0
from transformers import CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from .joint import TEXT_WIDTH, WORDS_WIDTH, Denoiser, new_scheduler
from .loop import save_exported
from .pool import load_autoencoder


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
    save_exported(out, provenance)
