"""Does it learn: losses on held-out pairs at fixed noise levels, beside those of predictors that
know less.
"""

import torch

from .joint import Denoiser, Stage, draw_batch
from .loop import generator, mixed_precision
from .pool import Pool

LEVELS = (0.98, 0.9, 0.7, 0.3)
PICTURES = 32


class MeanAttention:
    """Each attention's output for the image replaced by its mean over the image's tokens: nothing
    moves between places.
    """

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __call__(
        self,
        attn: torch.nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        image, text = self.inner(attn, hidden_states, encoder_hidden_states)
        return image.mean(1, keepdim=True).expand_as(image), text


def scalar_loss(noisy: torch.Tensor, target: torch.Tensor) -> float:
    """Of the best multiple of the input: what can be had without knowing any picture."""
    factor = (noisy * target).mean() / noisy.square().mean()
    return (factor * noisy - target).square().mean().item()


@torch.no_grad()
def probe(
    model: Denoiser, pool: Pool, tokens: dict[str, torch.Tensor], stage: Stage, seed: int
) -> None:
    g = generator(seed, "probe", 0)
    pool.grow(PICTURES)
    clean, words = draw_batch({"held-out": pool}, tokens, stage, 0, PICTURES, g)
    noise = torch.randn(clean.shape, generator=g)
    own = model.transformer.attn_processors
    print("held-out  sigma    model   no text  other's text  mean attention  scalar")
    for level in LEVELS:
        sigma = torch.full((len(clean),), level)
        noisy, target = (1 - level) * clean + level * noise, noise - clean

        def loss(given: torch.Tensor, noisy=noisy, target=target, sigma=sigma) -> float:
            with mixed_precision():
                chunks = zip(noisy.split(16), sigma.split(16), given.split(16), strict=True)
                predicted = torch.cat([model(*chunk).float() for chunk in chunks])
            return (predicted - target).square().mean().item()

        empty = tokens[""].expand_as(words)
        plain, no_text, other = loss(words), loss(empty), loss(words.roll(1, 0))
        model.transformer.set_attn_processor(MeanAttention(next(iter(own.values()))))
        mean = loss(words)
        model.transformer.set_attn_processor(dict(own))
        print(
            f"{level:15.2f} {plain:8.4f} {no_text:9.4f} {other:13.4f} {mean:15.4f}"
            f" {scalar_loss(noisy, target):7.4f}"
        )
