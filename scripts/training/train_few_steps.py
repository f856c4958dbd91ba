"""Train the few-step LoRA of the embedded transformer: four steps without guidance, on a CPU.

    python -m scripts.training.train_few_steps --work DIR              # 40 minutes, one core
    python -m scripts.training.train_few_steps --work DIR --straight   # the other form
    python -m scripts.training.train_few_steps --work DIR --export LORA  # newest checkpoint

The teacher is the embedded transformer in nine steps with guidance. Its trajectories of `COUNT`
noises are stored in DIR and used by both forms:

- At the sigmas of a schedule of four steps the student learns the teacher's mean velocity until the
  next of these sigmas, as in progressive distillation (arXiv 2202.00512) and SDXL-Lightning
  (arXiv 2402.13929), without their discriminator.
- ``--straight``: at any sigma it learns the velocity of the straight line from the noise to the
  teacher's image, as in rectified flow (arXiv 2209.03003; InstaFlow, arXiv 2309.06380).

Prompts are drawn from those that the teacher was trained on.
"""

import argparse
import itertools
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from mame_sd.embedded import model as subjects
from mame_sd.embedded.pipeline import embedded_pipeline
from mame_sd.embedded.scenes import scenes_by_caption
from mame_sd.runs.files import written_whole
from scripts.training.joint import CountedAttention, Denoiser, draw_sigmas
from scripts.training.loop import Stage, generator, mixed_precision
from scripts.training.recipe import Recipe, finish_export, run
from scripts.training.text import Tokens
from scripts.training.train_transformer import SHIFT

COUNT, SHARD = 448, 4  # trajectories, and how many of them a file holds
STEPS = 4
BETWEEN = (2, 2, 4, 1)  # steps of the teacher in each step of the student
RANK = 16
# The projections of attention and of the MLPs, and the modulation, of image and text.
LAYERS = (
    r"transformer_blocks\.\d+\.(attn\.(to_[qkv]|add_[qkv]_proj|to_out\.0|to_add_out)"
    r"|ff(_context)?\.net\.(0\.proj|2)|norm1\.linear)"
)


@cache
def schedule() -> list[float]:
    """Return the sigmas of `STEPS` steps: `STEPS` + 1 of them from 1 to 0."""
    scheduler = embedded_pipeline("transformer").scheduler
    scheduler.set_timesteps(STEPS)
    return [float(sigma) for sigma in scheduler.sigmas]


def shifted(time: torch.Tensor) -> torch.Tensor:
    """Return the sigmas of times in [0, 1], as the scheduler shifts them."""
    return SHIFT * time / (1 + (SHIFT - 1) * time)


def substeps(start: float, end: float, count: int) -> list[float]:
    """Return `count` + 1 sigmas from `start` to `end`, equally far apart before the shift."""
    ends = torch.tensor([start, end], dtype=torch.float64)
    first, last = ends / (SHIFT - (SHIFT - 1) * ends)
    return [float(s) for s in shifted(torch.linspace(first, last, count + 1))]


class FewSteps(Recipe[Stage]):
    """The recipe of the few-step LoRA."""

    @staticmethod
    def options(add: Callable[..., Any]) -> None:
        add("--straight", action="store_true", help="learn straight lines from noise to image")

    def __init__(self, args: argparse.Namespace) -> None:
        name = "straight" if args.straight else "steps"
        stage = Stage(name=name, steps=800, batch=4, lr=5e-4, warmup=50, decay=0.5, ema=0.99)
        super().__init__(args, (stage,))
        self.straight = args.straight
        self.guidance = subjects.DEFAULT_GUIDANCE["transformer"]
        pipe = embedded_pipeline("transformer")
        self.tokens = Tokens(pipe.tokenizer)
        self.prompts = [c for c, pair in scenes_by_caption().items() if not _held_out(pair)]
        self.parts = (pipe.transformer, pipe.text_encoder, pipe.text_encoder_2)
        self.words: list[str] = []
        self.points = torch.empty(0)

    def new_model(self, stage: Stage) -> Denoiser:
        model = Denoiser(*self.parts).requires_grad_(False)
        model.transformer.set_attn_processor(CountedAttention())
        if not getattr(model.transformer, "peft_config", None):
            config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LAYERS)
            model.transformer.add_adapter(config)
        return model

    def begin(self, stage: Stage, model: Denoiser) -> None:
        """Read or compute the trajectories. A LoRA that has learned nothing leaves the teacher."""
        self.words, self.points = self.trajectories(model)

    def trajectories(self, teacher: Denoiser) -> tuple[list[str], torch.Tensor]:
        """Return prompts and the teacher's latents at the sigmas of the schedule.

        Returns:
            `COUNT` prompts and latents [COUNT, STEPS + 1, 4, side, side], read or computed.
        """
        words, points = [], []
        for number in range(1 if self.smoke else COUNT // SHARD):
            path = self.work / "trajectories" / f"{number:04d}.npz"
            rng = random.Random(f"{self.seed}/{number}")
            prompts = rng.sample(self.prompts, SHARD)
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with written_whole(path) as file:
                    np.savez(file, points=self.trajectory(teacher, prompts, number).half().numpy())
                print(f"trajectories: {SHARD * (number + 1)} of {COUNT}", flush=True)
            words += prompts
            with np.load(path) as shard:
                points.append(torch.from_numpy(shard["points"]).float())
        return words, torch.cat(points)

    @torch.no_grad()
    def trajectory(self, teacher: Denoiser, prompts: list[str], number: int) -> torch.Tensor:
        """Compute the teacher's latents [n, STEPS + 1, 4, side, side] of n prompts."""
        side = teacher.transformer.config.sample_size
        g = generator(self.seed, "trajectories", number)
        latents = torch.randn(len(prompts), 4, side, side, generator=g)
        tokens = torch.stack([self.tokens[p] for p in ["", *prompts]])
        tokens = torch.cat([tokens[:1].expand(len(prompts), -1), tokens[1:]])
        points = [latents]
        for (start, end), count in zip(itertools.pairwise(schedule()), BETWEEN, strict=True):
            for here, there in itertools.pairwise(substeps(start, end, count)):
                sigma = torch.full((2 * len(prompts),), here)
                with mixed_precision():
                    both = teacher(torch.cat([latents, latents]), sigma, tokens).float()
                without, guided = both.chunk(2)
                velocity = without + self.guidance * (guided - without)
                latents = latents + (there - here) * velocity
            points.append(latents)
        return torch.stack(points, 1)

    def optimizer(self, stage: Stage, model: Denoiser) -> torch.optim.Optimizer:
        learned = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(learned, weight_decay=0.0)

    def loss(self, stage: Stage, model: Denoiser, step: int) -> torch.Tensor:
        g = generator(self.seed, stage.name, step)
        which = torch.randint(len(self.points), (stage.batch,), generator=g)
        points = self.points[which]
        words = torch.stack([self.tokens[self.words[int(n)]] for n in which])
        if self.straight:
            sigma = draw_sigmas(stage.batch, SHIFT, g)
            s = sigma[:, None, None, None]
            noisy, target = (1 - s) * points[:, -1] + s * points[:, 0], points[:, 0] - points[:, -1]
        else:
            sigmas = torch.tensor(schedule())
            at = torch.randint(STEPS, (stage.batch,), generator=g)
            rows = torch.arange(stage.batch)
            sigma = sigmas[at]
            noisy, after = points[rows, at], points[rows, at + 1]
            target = (after - noisy) / (sigmas[at + 1] - sigma)[:, None, None, None]
        with mixed_precision():
            velocity = model(noisy, sigma, words)
        return F.mse_loss(velocity.float(), target)

    def export(self, folder: Path, stage: Stage, origin: dict[str, str]) -> None:
        """Write the LoRA as diffusers' `load_lora_weights` reads it, in half precision."""
        layers = get_peft_model_state_dict(self.learned(stage).transformer)
        layers = {name: value.half() for name, value in layers.items()}
        StableDiffusion3Pipeline.save_lora_weights(folder, transformer_lora_layers=layers)
        finish_export(folder, origin)


def _held_out(pair: tuple[str, str]) -> bool:
    """Return True if the subject and background of a prompt were kept out of the training."""
    return subjects.is_held_out(*pair)


if __name__ == "__main__":
    run(FewSteps, __doc__)
