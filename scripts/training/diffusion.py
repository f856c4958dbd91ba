"""The diffusion stages: a small UNet on large patches first, then one level more around it at each
stage.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import DPMSolverMultistepScheduler, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTokenizer

from mame_sd.embedded import model as subjects

from .loop import cosine, fit, generator, mixed_precision, muon
from .text import TEXT_WIDTH, new_text_encoder

LATENTS = 64  # side of the latent grid at the default size
EMA_DECAY = 0.98


@dataclass(frozen=True)
class Stage:
    """One stage: ``patch`` latents a side go into one position of the UNet's first level."""

    name: str
    patch: int
    channels: tuple[int, ...]
    heads: tuple[int, ...]
    steps: int
    batch: int
    lr: float  # of Muon; AdamW's is a tenth
    lr_end: float
    warmup: int = 50
    # steps during which only the new outer level learns: it would spoil what the inner levels know
    frozen: int = 0
    # share of the timesteps drawn from the last 30 % of the noise, where a picture is decided
    decided: float = 0.5


def new_scheduler() -> DPMSolverMultistepScheduler:
    """Almost no signal at the last step (sqrt of alpha-bar: 0.003), so that plain backgrounds come
    out in any colour.
    """
    return DPMSolverMultistepScheduler(
        beta_start=0.00085,
        beta_end=0.03,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        final_sigmas_type="zero",
    )


def new_unet(stage: Stage) -> UNet2DConditionModel:
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


@dataclass
class Data:
    latents: torch.Tensor  # [glyphs, backgrounds, 4, LATENTS, LATENTS], mean square 1
    pairs: torch.Tensor  # [n, 2]: glyph and background of what may be trained on
    tokens: torch.Tensor  # [glyphs, backgrounds, 77]
    empty: torch.Tensor  # [77], the tokens of ""
    alphas: torch.Tensor  # [1000], alpha-bar


@torch.no_grad()
def grow(small: UNet2DConditionModel, large: UNet2DConditionModel) -> None:
    """Put the levels of ``small`` inside ``large``, which has one level more around them."""
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
    t = torch.arange(
        1000
    )  # the sinusoids have another width: give nearly the same embedding of t, by small weights
    wanted = small.time_embedding.linear_1(small.time_proj(t)).double()
    basis = torch.cat([large.time_proj(t).double(), torch.ones(1000, 1, dtype=torch.float64)], 1)
    ridge = 10 * torch.eye(basis.shape[1], dtype=torch.float64)
    solution = torch.linalg.solve(basis.T @ basis + ridge, basis.T @ wanted).float()
    new["time_embedding.linear_1.weight"].copy_(solution[:-1].T)
    new["time_embedding.linear_1.bias"].copy_(solution[-1])


def freeze_inner(model: "Denoiser", frozen: bool) -> None:
    """Let only the outermost level and the edges of the UNet learn, or everything."""
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
    def __init__(self, unet: UNet2DConditionModel, text_encoder: CLIPTextModel) -> None:
        super().__init__()
        self.unet, self.text_encoder = unet, text_encoder


def training_pairs(glyph_count: int) -> torch.Tensor:
    names, backgrounds = subjects.glyph_names()[:glyph_count], list(subjects.BACKGROUNDS)
    pairs = [
        (i, j)
        for i, n in enumerate(names)
        for j, b in enumerate(backgrounds)
        if not subjects.is_held_out(n, b)
    ]
    return torch.tensor(pairs)


def sample_timesteps(batch: int, decided: float, g: torch.Generator) -> torch.Tensor:
    """``decided`` of them in the last 30 % of the noise, stratified over the batch."""
    u = (torch.rand(1, generator=g) + torch.arange(batch) / batch) % 1
    u = torch.where(u < decided, 0.7 + u / decided * 0.3, (u - decided) / (1 - decided) * 0.7)
    return (u * 1000).long().clamp(0, 999)


def diffusion_loss(model: Denoiser, stage: Stage, data: Data, seed: int, step: int) -> torch.Tensor:
    g = generator(seed, stage.name, step)
    pair = data.pairs[torch.randint(len(data.pairs), (stage.batch,), generator=g)]
    clean = data.latents[pair[:, 0], pair[:, 1]]
    noise = torch.randn(clean.shape, generator=g)
    t = sample_timesteps(stage.batch, stage.decided, g)
    tokens = data.tokens[pair[:, 0], pair[:, 1]].clone()
    tokens[torch.rand(stage.batch, generator=g) < 0.1] = data.empty
    a = data.alphas[t].sqrt()[:, None, None, None]
    s = (1 - data.alphas[t]).sqrt()[:, None, None, None]
    noisy, target = a * clean + s * noise, a * noise - s * clean
    noisy = F.pixel_unshuffle(noisy, stage.patch).to(memory_format=torch.channels_last)
    with mixed_precision():
        text = model.text_encoder(tokens).last_hidden_state
        predicted = model.unet(noisy, t, text).sample
    return F.mse_loss(F.pixel_shuffle(predicted.float(), stage.patch), target)


def is_inside(name: str) -> bool:
    """Whether a parameter of that name is a weight of the UNet's or the text encoder's layers."""
    return not any(edge in name for edge in ("conv_in", "conv_out", "embedding"))


def train_stage(
    work: Path,
    stage: Stage,
    previous: Stage | None,
    data: Data,
    tokenizer: CLIPTokenizer,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    model = Denoiser(new_unet(stage), new_text_encoder(tokenizer)).to(
        memory_format=torch.channels_last
    )
    if previous:
        state = torch.load(work / f"{previous.name}.pt", weights_only=True)["ema"]
        small = Denoiser(new_unet(previous), new_text_encoder(tokenizer))
        small.load_state_dict(state)
        model.text_encoder.load_state_dict(small.text_encoder.state_dict())
        grow(small.unet, model.unet)

    def loss(step: int) -> torch.Tensor:
        freeze_inner(model, step < stage.frozen)
        return diffusion_loss(model, stage, data, seed, step)

    fit(
        work / f"{stage.name}.pt",
        stage.name,
        model,
        muon(model, is_inside),
        stage.steps,
        loss,
        lambda step: cosine(step, stage.steps, stage.lr, stage.lr_end, stage.warmup),
        ema=EMA_DECAY,
    )
