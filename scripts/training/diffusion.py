"""Diffusion stages: a small UNet on large patches, then one more level around it at each stage."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers import DPMSolverMultistepScheduler, UNet2DConditionModel
from transformers import CLIPTextModel

from mame_sd.embedded import model as subjects
from scripts.training.loop import CosineStage
from scripts.training.recipe import refit
from scripts.training.text import TEXT_WIDTH

LATENTS = 64  # side of the latent grid at the default size


@dataclass(frozen=True, kw_only=True)
class UNetStage(CosineStage):
    """A stage in which ``patch`` latents a side go into one position of the UNet's first level."""

    patch: int
    channels: tuple[int, ...]
    heads: tuple[int, ...]
    warmup: int = 50
    ema: float | None = 0.98
    # steps during which only the new outer level learns: it would spoil what the inner levels know
    frozen: int = 0
    # share of the timesteps drawn from the last 30 % of the noise, where a picture is decided
    decided: float = 0.5


def new_scheduler() -> DPMSolverMultistepScheduler:
    """Return a scheduler with almost no signal at the last step (sqrt of alpha-bar is 0.003).

    So plain backgrounds come out in any colour.
    """
    return DPMSolverMultistepScheduler(
        beta_start=0.00085,
        beta_end=0.03,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        final_sigmas_type="zero",
    )


def new_unet(stage: UNetStage) -> UNet2DConditionModel:
    """Return the UNet of a stage with random weights."""
    inner = len(stage.channels) - 1
    return UNet2DConditionModel(
        sample_size=LATENTS // stage.patch,
        in_channels=4 * stage.patch**2,
        out_channels=4 * stage.patch**2,
        block_out_channels=stage.channels,
        layers_per_block=1,
        attention_head_dim=stage.heads,
        norm_num_groups=16,
        down_block_types=("CrossAttnDownBlock2D",) * inner + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * inner,
        cross_attention_dim=TEXT_WIDTH,
        time_embedding_dim=256,
    )


@torch.no_grad()
def grow(small: UNet2DConditionModel, large: UNet2DConditionModel) -> None:
    """Put the levels of ``small`` inside ``large``, which has one more level around them."""
    own, new = small.state_dict(), large.state_dict()
    shift = len(large.down_blocks) - len(small.down_blocks)
    for name, value in own.items():
        parts = name.split(".")
        if parts[0] == "down_blocks":
            parts[1] = str(int(parts[1]) + shift)
        target = new.get(".".join(parts))
        if target is None or parts[0] in ("conv_in", "conv_out", "conv_norm_out"):
            continue
        if target.shape == value.shape:
            target.copy_(value)
        elif parts[0] == "up_blocks" and value.ndim == 4 and target.shape[0] == value.shape[0]:
            target[:, : small.config.block_out_channels[0]].copy_(
                value[:, : small.config.block_out_channels[0]]
            )
    # The sinusoids have another width: give nearly the same embedding of t, by small weights.
    t = torch.arange(1000)
    wanted = small.time_embedding.linear_1(small.time_proj(t))
    refit(large.time_embedding.linear_1, large.time_proj(t), wanted, ridge=10)


def freeze_inner(model: "Denoiser", frozen: bool) -> None:
    """Train only the outermost level and the edges of the UNet, or everything."""
    last = len(model.unet.up_blocks) - 1
    outer = (
        "unet.conv_",
        "unet.down_blocks.0.",
        "unet.down_blocks.1.resnets.0.",
        f"unet.up_blocks.{last}.",
        f"unet.up_blocks.{last - 1}.resnets.1.",
        f"unet.up_blocks.{last - 1}.upsamplers.",
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or name.startswith(outer))


class Denoiser(torch.nn.Module):
    """What is trained: the UNet and its text encoder."""

    def __init__(self, unet: UNet2DConditionModel, text_encoder: CLIPTextModel) -> None:
        super().__init__()
        self.unet, self.text_encoder = unet, text_encoder


def training_pairs(names: Sequence[str]) -> torch.Tensor:
    """Return the indices of glyph and background [n, 2] of the pairs that may be trained on."""
    pairs = [
        (i, j)
        for i, name in enumerate(names)
        for j, background in enumerate(subjects.BACKGROUNDS)
        if not subjects.is_held_out(name, background)
    ]
    return torch.tensor(pairs)


def sample_timesteps(batch: int, decided: float, g: torch.Generator) -> torch.Tensor:
    """Draw stratified timesteps, ``decided`` of them in the last 30 % of the noise."""
    u = (torch.rand(1, generator=g) + torch.arange(batch) / batch) % 1
    u = torch.where(u < decided, 0.7 + u / decided * 0.3, (u - decided) / (1 - decided) * 0.7)
    return (u * 1000).long().clamp(0, 999)
