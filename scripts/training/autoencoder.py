"""The autoencoder: trained on crops of glyphs, then used once to encode every picture."""

from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny

from mame_sd.embedded import model as subjects
from scripts.training.loop import CosineStage, atomic_save, fit, generator, mixed_precision

AUTOENCODER = CosineStage(name="autoencoder", steps=2400, batch=16, lr=2e-3, lr_end=1e-5, ema=None)


def new_autoencoder() -> AutoencoderTiny:
    """Return the autoencoder with random weights."""
    return AutoencoderTiny(
        encoder_block_out_channels=(48, 48, 48),
        decoder_block_out_channels=(48, 48, 48),
        num_encoder_blocks=(1, 2, 2),
        num_decoder_blocks=(2, 2, 1),
    )


def crops(
    rgba: torch.Tensor, colors: torch.Tensor, size: int, batch: int, g: torch.Generator
) -> torch.Tensor:
    """Draw random crops of random glyphs on random colours.

    Args:
        rgba: Glyphs [n, 4, 256, 256].
        colors: The colours.
        size: Side of a crop.
        batch: Number of crops.
        g: The random generator.

    Returns:
        [batch, 3, size, size] in [-1, 1].
    """
    glyph = torch.randint(len(rgba), (batch,), generator=g).tolist()
    color = colors[torch.randint(len(colors), (batch,), generator=g)]
    noise = torch.rand(batch, 3, generator=g)
    color = torch.where(torch.rand(batch, 1, generator=g) < 0.5, color, noise)[:, :, None, None]
    corner = torch.randint(rgba.shape[-1] - size + 1, (batch, 2), generator=g).tolist()
    cut = (
        torch.stack(
            [
                rgba[i, :, y : y + size, x : x + size]
                for i, (y, x) in zip(glyph, corner, strict=True)
            ]
        ).float()
        / 255
    )
    return (cut[:, :3] * cut[:, 3:] + color * (1 - cut[:, 3:])) * 2 - 1


def autoencoder_loss(
    vae: AutoencoderTiny, images: torch.Tensor, g: torch.Generator
) -> torch.Tensor:
    """Compute L1 and gradient loss of the reconstruction from slightly noisy latents.

    A penalty keeps the latents small.
    """
    latents = vae.encode(images).latents
    noise = 0.05 * torch.randn(latents.shape, generator=g)
    output = vae.decode(latents + noise.to(latents)).sample.float()
    edges = sum(F.l1_loss(output.diff(dim=d), images.diff(dim=d)) for d in (2, 3))
    center = latents.float().mean((0, 2, 3)).square().mean()
    return (
        F.l1_loss(output, images)
        + edges
        + 0.02 * (F.relu(latents.float().abs() - 2).square().mean() + center)
    )


def train_autoencoder(
    work: Path, rgba: torch.Tensor, seed: int, stage: CosineStage
) -> AutoencoderTiny:
    """Train the autoencoder to the end of a stage."""
    torch.manual_seed(seed)
    vae = new_autoencoder().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(vae.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    colors = torch.tensor(list(subjects.BACKGROUNDS.values())) / 255

    def loss(step: int) -> torch.Tensor:
        g = generator(seed, stage.name, step)
        images = crops(rgba, colors, 64, stage.batch, g).to(memory_format=torch.channels_last)
        with mixed_precision():
            return autoencoder_loss(vae, images, g)

    fit(work, stage, vae, optimizer, loss)
    return vae


def pictures(rgba: torch.Tensor, background: str) -> torch.Tensor:
    """Return every glyph on one background."""
    color = torch.tensor(subjects.BACKGROUNDS[background], dtype=torch.float32)[:, None, None] / 255
    cut = rgba.float() / 255
    return (cut[:, :3] * cut[:, 3:] + color * (1 - cut[:, 3:])) * 2 - 1


@torch.no_grad()
def all_latents(work: Path, vae: AutoencoderTiny, rgba: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Encode every glyph on every background.

    Args:
        work: Folder of the training.
        vae: The autoencoder.
        rgba: Glyphs.

    Returns:
        Latents [glyphs, backgrounds, 4, h, w], scaled to mean square 1, and that scale.
    """
    path = work / "latents.pt"
    if not path.exists():
        rows = []
        for background in subjects.BACKGROUNDS:
            images = pictures(rgba, background).to(memory_format=torch.channels_last)
            with mixed_precision():
                rows.append(
                    torch.cat([vae.encode(chunk).latents.float() for chunk in images.split(16)])
                )
        latents = torch.stack(rows, 1)
        scale = 1 / latents.square().mean().sqrt().item()
        atomic_save({"latents": latents * scale, "scale": scale}, path)
    found = torch.load(path, weights_only=True)
    return found["latents"], found["scale"]
