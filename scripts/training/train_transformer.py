"""Train the embedded transformer (joint attention of text and image) on a CPU.

    python -m scripts.training.train_transformer --work DIR                   # ten hours, two cores
    python -m scripts.training.train_transformer --work DIR --until tokens64  # up to this stage
    python -m scripts.training.train_transformer --work DIR --export MODEL    # newest checkpoint
    python -m scripts.training.train_transformer --work DIR --smoke  # all of it in a minute

A stopped training continues when it is started again. `--export` writes a pipeline folder,
`--smoke` writes one into DIR/model.

The recipe is the UNet's: coarse first. 64 tokens of 4 x 4 latents of pictures at half the side
learn where things are and in which colours. 256 tokens at the full side learn the details. 1,024
tokens of 2 x 2 latents, the form that is shipped, refine them. In this world (`world.py`) tokens
need one another.

Why this form:

- ``SD3Transformer2DModel`` in a ``StableDiffusion3Pipeline`` without T5. Instead of T5's states the
  pipeline puts 256 zero tokens after the prompt's 20. They are all equal and stay equal. So
  training runs one of them and counts it 256 times (`joint.py`, `CountedAttention`). What is
  trained is exactly what the pipeline computes.
- Two text encoders, since the pipeline needs two. One is the embedded model's, which knows the
  names and colours already and is trained further. The other is a single layer whose last hidden
  state but one is the words themselves. Widths 192 + 64 are the ``joint_attention_dim``, so that
  nothing is padded.
- Width 256 in 6 blocks (13.8 M) instead of 192 in 10 (13.2 M). It processes 31, 10.5 and 1.7
  pictures a second, compared with 27, 8.0 and 1.4, at 64, 256 and 1,024 tokens on one thread.
- Noise levels: logit-normal, shifted by 4 at 32 x 32 latents and 6 at 64 x 64, where averaging over
  four times the latents leaves half the noise.
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from diffusers.models.attention_processor import JointAttnProcessor2_0
from transformers import CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from mame_sd.embedded.scenes import SUBJECTS
from scripts.training import growth, joint
from scripts.training.joint import Denoiser, JointStage
from scripts.training.loop import generator
from scripts.training.pool import Pool, load_autoencoder
from scripts.training.recipe import Recipe, finish_export, run
from scripts.training.text import TEXT_WIDTH, Tokens

SHIFT = 6.0  # of the scheduler: 64 x 64 latents are decided in high noise


def stage(name: str, side: int, patch: int, **more: Any) -> JointStage:
    return JointStage(name=name, side=side, patch=patch, **more)


STAGES = (
    stage("tokens64", 32, 4, steps=1500, batch=48, lr=0.01, shift=4.0, pool=(1200, 0.15)),
    stage("tokens256", 64, 4, steps=900, batch=24, lr=0.006, shift=6.0, pool=(1450, 0.4)),
    stage("tokens1024", 64, 2, steps=480, batch=8, lr=0.004, shift=6.0, pool=(1810, 0.1)),
)


class JointRecipe(Recipe[JointStage]):
    """The recipe of the embedded transformer."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args, STAGES, pool=(4, 0))
        glyphs, shard = (8, 4) if self.smoke else (len(SUBJECTS), 64)
        self.pool = Pool(self.work / "pool", self.seed, glyphs, shard)
        self.tokens = Tokens(joint.joint_tokenizer())

    def new_model(self, stage: JointStage) -> Denoiser:
        return joint.new_denoiser(stage, self.tokens.tokenizer)

    def begin(self, stage: JointStage, model: Denoiser) -> None:
        before = self.before(stage)
        if before:

            def draw(number: int) -> joint.Batch:
                g = generator(self.seed, f"grow {stage.name}", number)
                return joint.draw_batch(self.pool, self.tokens, stage, 0, growth.BATCH, g)

            growth.grow(self.learned(before), before, model, stage, draw)

    def optimizer(self, stage: JointStage, model: Denoiser) -> torch.optim.Optimizer:
        return joint.optimizer_for(model)

    def loss(self, stage: JointStage, model: Denoiser, step: int) -> torch.Tensor:
        g = generator(self.seed, stage.name, step)
        batch = joint.draw_batch(self.pool, self.tokens, stage, step, stage.batch, g)
        return joint.flow_loss(model, batch, self.tokens[""], g)

    def export(self, folder: Path, stage: JointStage, origin: dict[str, str]) -> None:
        """Write a plain StableDiffusion3Pipeline folder in half precision."""
        pipe = new_pipeline(self.learned(stage), self.tokens.tokenizer)
        blank, blank_tokenizer = blank_t5()
        pipe.register_modules(text_encoder_3=blank, tokenizer_3=blank_tokenizer)
        pipe.to(dtype=torch.float16).save_pretrained(folder)
        finish_export(folder, origin)


def new_pipeline(model: Denoiser, tokenizer: CLIPTokenizer) -> StableDiffusion3Pipeline:
    """Return the pipeline of a trained model."""
    model = copy.deepcopy(model)
    model.transformer.set_attn_processor(JointAttnProcessor2_0())
    pipe = StableDiffusion3Pipeline(
        transformer=model.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
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
    """Return a T5 without layers that answers zero to every prompt.

    The pipeline does the same by itself if it has none, but ``from_pretrained`` refuses a folder
    without one unless it is called with ``text_encoder_3=None``.
    """
    blank = T5EncoderModel(
        T5Config(
            vocab_size=3,
            d_model=TEXT_WIDTH + joint.WORDS_WIDTH,
            d_kv=1,
            d_ff=1,
            num_layers=0,
            num_heads=1,
        )
    )
    torch.nn.init.zeros_(blank.shared.weight)
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return blank, T5Tokenizer(vocab=vocabulary, extra_ids=0)


if __name__ == "__main__":
    run(JointRecipe, __doc__)
