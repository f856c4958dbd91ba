"""Start a stage with finer tokens from the previous one, keeping what it learned valid.

The layers are taken unchanged, and the position embedding is a function of the place in the picture
at every grid. Three parts change their meaning and are fitted again by least squares:

- the time embedding, if the side of the latents grows by n. Averaging over n x n latents divides
  the noise by n, so what the layers know of noise level a belongs to n a / (1 + (n - 1) a) now;
- the patch embedding, if the patch shrinks: each fine token should enter the layers as nearly as
  possible like the coarse one around it;
- the output projection: the best linear reading of the layers' output, close to the old one where
  the data don't determine it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from scripts.training.joint import Batch, Denoiser, JointStage
from scripts.training.loop import FEW, mixed_precision
from scripts.training.recipe import refit

BATCHES, BATCH = 12, 8  # and pictures of each


def affine(layer: torch.nn.Module) -> torch.Tensor:
    """Return weights and bias of a layer as one matrix."""
    return torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1)


def patches(latents: torch.Tensor, patch: int) -> torch.Tensor:
    """Return [tokens, channels * patch * patch], in the order of the patch embedding's weights."""
    return F.unfold(latents, patch, stride=patch).transpose(1, 2).flatten(0, 1)


def output_patches(latents: torch.Tensor, patch: int) -> torch.Tensor:
    """Return [tokens, patch * patch * channels], in the order of the output projection."""
    return patches(latents, patch).unflatten(1, (latents.shape[1], -1)).transpose(1, 2).flatten(1)


@torch.no_grad()
def map_time(small: Denoiser, large: Denoiser, ratio: int) -> float:
    """Fit the time embedding of ``large`` to that of ``small`` at the corresponding noise level.

    Returns the relative error of the fit.
    """
    old, new = small.transformer.time_text_embed, large.transformer.time_text_embed
    now = torch.linspace(0.001, 1, 4000)
    then = now / (ratio - (ratio - 1) * now)
    wanted = old.timestep_embedder.linear_1(old.time_proj(then * 1000))
    inputs = new.time_proj(now * 1000)
    layer = new.timestep_embedder.linear_1
    refit(layer, inputs, wanted, ridge=1)
    return ((layer(inputs) - wanted).square().mean() / wanted.square().mean()).sqrt().item()


@torch.no_grad()
def grow(
    small: Denoiser,
    before: JointStage,
    large: Denoiser,
    after: JointStage,
    draw: Callable[[int], Batch],
) -> None:
    """Start `large`, of the stage `after`, as `small` ended the stage `before`.

    Args:
        small: The trained model.
        before: Its stage.
        large: The model of the next stage.
        after: The next stage.
        draw: Draws the batch of a number, as `large` will see it.
    """
    kept = {k: v for k, v in small.state_dict().items() if large.state_dict()[k].shape == v.shape}
    large.load_state_dict(kept, strict=False)
    if before.side != after.side:
        print(
            f"{after.name}: time embedding, relative error"
            f" {map_time(small, large, after.side // before.side):.4f}"
        )
    batches = [draw(n) for n in range(BATCHES if after.steps >= FEW else 1)]
    old, new = small.transformer, large.transformer
    if before.patch != after.patch:
        ratio = before.patch // after.patch
        noisy = torch.cat([batch.noisy for batch in batches])
        coarse = old.pos_embed.proj(noisy).repeat_interleave(ratio, 2).repeat_interleave(ratio, 3)
        # as if the patch were drawn at double size
        spread = F.avg_pool2d(old.pos_embed.proj.weight, ratio) * ratio**2
        prior = torch.cat([spread.flatten(1), old.pos_embed.proj.bias[:, None]], 1)
        refit(
            new.pos_embed.proj,
            patches(noisy, after.patch),
            coarse.flatten(2).transpose(1, 2).flatten(0, 1),
            prior,
        )
        for ours, theirs in zip(new.proj_out.parameters(), old.proj_out.parameters(), strict=True):
            cells = theirs.unflatten(0, (after.patch, ratio, after.patch, ratio, -1))
            ours.copy_(cells.mean((1, 3)).flatten(0, 2))
    features: list[torch.Tensor] = []
    handle = new.proj_out.register_forward_pre_hook(
        lambda _, args: features.append(args[0].float().flatten(0, 1))
    )
    with mixed_precision():
        for batch in batches:
            large(batch.noisy, batch.sigma, batch.words)
    handle.remove()
    inputs = torch.cat(features)
    targets = torch.cat([output_patches(batch.velocity, after.patch) for batch in batches])

    def error() -> float:
        return (new.proj_out(inputs) - targets).square().mean().item()

    first = error()
    refit(new.proj_out, inputs, targets, affine(new.proj_out))
    print(
        f"{after.name}: loss {first:.4f} with the old output projection, {error():.4f} with the"
        " fitted one"
    )
