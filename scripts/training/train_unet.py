"""Train the embedded model from nothing: autoencoder, tokenizer, text encoder and UNet, on a CPU.

    python -m scripts.training.train_unet --work out/train    # hours on two cores; stop at will
    python -m scripts.training.train_unet --work out/train --export DIR  # newest checkpoint
    python -m scripts.training.train_unet --smoke --work DIR  # all of it in a minute, DIR/model

The recipe: the UNet's inner levels are trained first, on 8 x 8 patches of 8 x 8 latents. There a
step is cheap, and every position knows its place from the padding around it. They learn which shape
in which colours a caption means. Then an outer level is put around them (16 x 16 patches of 4 x 4),
then another (32 x 32). The last one sees the plain 64 x 64 latents. What the inner levels know
remains valid at each growth, since every cell keeps its place in the picture. They are frozen until
the new level has learned to work with them.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import StableDiffusionPipeline

from mame_sd.embedded import model as subjects
from scripts.training import diffusion
from scripts.training.autoencoder import AUTOENCODER, all_latents, train_autoencoder
from scripts.training.diffusion import Denoiser, UNetStage
from scripts.training.loop import generator, mixed_precision, muon
from scripts.training.recipe import Recipe, finish_export, run
from scripts.training.text import caption_tokens, new_text_encoder, new_tokenizer


def stage(name: str, patch: int, widths: tuple[int, ...], **more: Any) -> UNetStage:
    """Return a stage with heads of 64 channels, of 500 steps unless `more` says otherwise."""
    heads = tuple(max(1, round(width / 64)) for width in widths)
    return UNetStage(**{"name": name, "patch": patch, "channels": widths, "heads": heads, **more})


STAGES = (
    stage("patch8", 8, (192, 224), steps=1100, batch=64, lr=0.01, lr_end=0.001, decided=0.8),
    stage("patch4", 4, (128, 192, 224), steps=500, batch=48, lr=0.008, lr_end=0.002, frozen=100),
    stage(
        "patch2", 2, (64, 128, 192, 224), steps=500, batch=16, lr=0.008, lr_end=0.001, frozen=120
    ),
    stage("patch1", 1, (32, 64, 128, 192, 224), steps=500, batch=8, lr=0.008, lr_end=0, frozen=150),
)


class UNetRecipe(Recipe[UNetStage]):
    """The recipe of the embedded UNet: first the autoencoder, which encodes all pictures once."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args, STAGES)
        names, backgrounds = subjects.glyph_names(), list(subjects.BACKGROUNDS)
        captions = [subjects.caption(n, b) for n in names for b in backgrounds]
        self.tokenizer = new_tokenizer(captions)
        autoencoder = AUTOENCODER
        if self.smoke:
            names, autoencoder = names[:2], replace(AUTOENCODER, steps=1)
            self.stages = [
                replace(s, channels=tuple(w // 2 for w in s.channels), frozen=min(s.frozen, 1))
                for s in self.stages
            ]
        rgba = torch.from_numpy(subjects.glyphs()[: len(names)].copy()).permute(0, 3, 1, 2)
        self.vae = train_autoencoder(self.work, rgba, self.seed, autoencoder)
        self.latents, self.scale = all_latents(self.work, self.vae, rgba)
        shown = captions[: len(names) * len(backgrounds)]
        self.tokens = caption_tokens(self.tokenizer, shown).view(len(names), len(backgrounds), -1)
        self.nothing = caption_tokens(self.tokenizer, [""])[0]
        self.pairs = diffusion.training_pairs(names)
        self.alphas = diffusion.new_scheduler().alphas_cumprod

    def new_model(self, stage: UNetStage) -> Denoiser:
        model = Denoiser(diffusion.new_unet(stage), new_text_encoder(self.tokenizer))
        return model.to(memory_format=torch.channels_last)

    def begin(self, stage: UNetStage, model: Denoiser) -> None:
        before = self.before(stage)
        if before:
            small = self.learned(before)
            model.text_encoder.load_state_dict(small.text_encoder.state_dict())
            diffusion.grow(small.unet, model.unet)

    def optimizer(self, stage: UNetStage, model: Denoiser) -> torch.optim.Optimizer:
        edges = ("conv_in", "conv_out", "embedding")
        return muon(model, lambda name: not any(edge in name for edge in edges))

    def loss(self, stage: UNetStage, model: Denoiser, step: int) -> torch.Tensor:
        diffusion.freeze_inner(model, step < stage.frozen)
        g = generator(self.seed, stage.name, step)
        pair = self.pairs[torch.randint(len(self.pairs), (stage.batch,), generator=g)]
        clean = self.latents[pair[:, 0], pair[:, 1]]
        noise = torch.randn(clean.shape, generator=g)
        t = diffusion.sample_timesteps(stage.batch, stage.decided, g)
        tokens = self.tokens[pair[:, 0], pair[:, 1]].clone()
        tokens[torch.rand(stage.batch, generator=g) < 0.1] = self.nothing
        a = self.alphas[t].sqrt()[:, None, None, None]
        s = (1 - self.alphas[t]).sqrt()[:, None, None, None]
        noisy, target = a * clean + s * noise, a * noise - s * clean
        noisy = F.pixel_unshuffle(noisy, stage.patch).to(memory_format=torch.channels_last)
        with mixed_precision():
            text = model.text_encoder(tokens).last_hidden_state
            predicted = model.unet(noisy, t, text).sample
        return F.mse_loss(F.pixel_shuffle(predicted.float(), stage.patch), target)

    def export(self, folder: Path, stage: UNetStage, origin: dict[str, str]) -> None:
        """Write a plain StableDiffusionPipeline folder in half precision."""
        model = self.learned(stage)
        self.vae.register_to_config(scaling_factor=self.scale)
        pipe = StableDiffusionPipeline(
            vae=self.vae,
            text_encoder=model.text_encoder,
            tokenizer=self.tokenizer,
            unet=model.unet,
            scheduler=diffusion.new_scheduler(),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        pipe.to(dtype=torch.float16).save_pretrained(folder)
        finish_export(folder, origin)


if __name__ == "__main__":
    run(UNetRecipe, __doc__)
