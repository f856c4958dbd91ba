"""The transformer with joint attention: parts, training data, growth from coarse to fine tokens."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from mame_sd.embedded import model as subjects
from scripts.training import world
from scripts.training.loop import Stage, mixed_precision, muon
from scripts.training.pool import Pool
from scripts.training.text import TEXT_WIDTH, new_tokenizer, text_config

WIDTH, HEADS, BLOCKS = 256, 4, 6
WORDS_WIDTH = 64  # of the second text encoder
TEXT_LENGTH = 20  # tokens of a prompt
IDLE = 256  # zero tokens that StableDiffusion3Pipeline puts after the prompt's when it has no T5
# Below so many tokens attention in three operations trains 2 to 4 times as fast on a CPU as fused.
WRITTEN_OUT = 512
POSITIONS = 16.0  # side of the picture in the units of the position embedding, at every grid


@dataclass(frozen=True, kw_only=True)
class JointStage(Stage):
    """A stage whose latents are averaged to ``side`` x ``side``, in patches of ``patch``."""

    side: int
    patch: int
    shift: float  # of the noise levels it learns at: more is noisier
    pool: tuple[int, float]  # scenes at the first step, and more per step


class Batch(NamedTuple):
    """What a step learns from.

    Attributes:
        noisy: Latents with noise, [B, 4, side, side].
        sigma: Noise levels [B] in (0, 1].
        words: Tokens of the captions, [B, TEXT_LENGTH].
        velocity: The target, noise minus latents.
    """

    noisy: torch.Tensor
    sigma: torch.Tensor
    words: torch.Tensor
    velocity: torch.Tensor


class Denoiser(torch.nn.Module):
    """What is trained: the transformer and its two text encoders."""

    def __init__(
        self,
        transformer: SD3Transformer2DModel,
        text_encoder: CLIPTextModelWithProjection,
        text_encoder_2: CLIPTextModelWithProjection,
    ) -> None:
        super().__init__()
        self.transformer = transformer
        self.text_encoder, self.text_encoder_2 = text_encoder, text_encoder_2

    def forward(
        self, noisy: torch.Tensor, sigma: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Compute the velocity as the pipeline does; ``IDLE`` zero tokens are counted once.

        See `CountedAttention`.
        """
        one, two = (
            e(tokens, output_hidden_states=True) for e in (self.text_encoder, self.text_encoder_2)
        )
        words = torch.cat([one.hidden_states[-2], two.hidden_states[-2]], -1)
        words = F.pad(words, (0, 0, 0, 1))
        pooled = torch.cat([one.text_embeds, two.text_embeds], -1)
        return self.transformer(noisy, words, pooled, sigma * 1000, return_dict=False)[0]


class CountedAttention:
    """Joint attention in which the last token stands for ``IDLE`` equal ones.

    The output is the same at a fifth of the cost: equal tokens stay equal in every layer, and n
    equal keys weigh as much as one whose logit is greater by log n.
    """

    def __call__(
        self,
        attn: torch.nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(-1, (attn.heads, -1)).transpose(1, 2)

        text = encoder_hidden_states
        of_image = attn.norm_q(heads(attn.to_q(hidden_states)))
        query = torch.cat([of_image, attn.norm_added_q(heads(attn.add_q_proj(text)))], 2)
        of_image = attn.norm_k(heads(attn.to_k(hidden_states)))
        key = torch.cat([of_image, attn.norm_added_k(heads(attn.add_k_proj(text)))], 2)
        value = torch.cat([heads(attn.to_v(hidden_states)), heads(attn.add_v_proj(text))], 2)
        count = torch.zeros(key.shape[2], dtype=value.dtype)
        count[-1] = math.log(IDLE)
        query, key = query.to(value.dtype), key.to(value.dtype)
        if key.shape[2] < WRITTEN_OUT:
            scores = query @ key.transpose(2, 3) / math.sqrt(key.shape[3]) + count
            out = scores.softmax(-1) @ value
        else:
            mask = count.expand(1, 1, key.shape[2], -1)
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out = out.transpose(1, 2).flatten(2)
        image, words = out[:, : hidden_states.shape[1]], out[:, hidden_states.shape[1] :]
        image = attn.to_out[0](image)
        return image, (words if attn.context_pre_only else attn.to_add_out(words))


def position_embedding(grid: int) -> torch.Tensor:
    """Return [1, grid * grid, WIDTH]: sines and cosines of the tokens' centres.

    Their units don't depend on the grid.
    """
    at = (torch.arange(grid, dtype=torch.float64) + 0.5) * POSITIONS / grid
    rate = 1 / 10000 ** (torch.arange(WIDTH // 4, dtype=torch.float64) / (WIDTH // 4))
    waves = torch.cat([(at[:, None] * rate).sin(), (at[:, None] * rate).cos()], 1)
    across, down = waves[None].expand(grid, -1, -1), waves[:, None].expand(-1, grid, -1)
    return torch.cat([across, down], -1).flatten(0, 1)[None].float()


def new_transformer(side: int, patch: int) -> SD3Transformer2DModel:
    """Return the transformer with random weights."""
    model = SD3Transformer2DModel(
        sample_size=side,
        patch_size=patch,
        in_channels=4,
        out_channels=4,
        num_layers=BLOCKS,
        attention_head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_WIDTH + WORDS_WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=TEXT_WIDTH + WORDS_WIDTH,
        pos_embed_max_size=side // patch,
        qk_norm="rms_norm",
    )
    model.pos_embed.pos_embed.copy_(position_embedding(side // patch))
    with torch.no_grad():  # each block starts as the identity
        norms = [(block.norm1, block.norm1_context) for block in model.transformer_blocks]
        gates = [norm.linear for pair in norms for norm in pair]
        for layer in (*gates, model.norm_out.linear, model.proj_out):
            layer.weight.zero_()
            layer.bias.zero_()
    return model


def joint_tokenizer() -> CLIPTokenizer:
    """Return a tokenizer for the embedded model's words and those of the backgrounds.

    Prompts are cut at `TEXT_LENGTH` tokens.
    """
    return new_tokenizer(world.all_captions(), TEXT_LENGTH)


def new_text_encoders(
    tokenizer: CLIPTokenizer,
) -> tuple[CLIPTextModelWithProjection, CLIPTextModelWithProjection]:
    """Return two text encoders, since the pipeline needs two.

    The first is the embedded model's, as it was trained, in a larger vocabulary. The second is a
    small one without context. The pipeline reads the last hidden state but one: of the first that
    is the words in their context, of the second, with its single layer, the words themselves.
    """
    first, second = (
        CLIPTextModelWithProjection(text_config(tokenizer, *shape))
        for shape in ((TEXT_WIDTH, 3), (WORDS_WIDTH, 1))
    )
    folder = subjects.embedded_model_path()
    known = CLIPTextModel.from_pretrained(folder / "text_encoder", dtype=torch.float32).state_dict()
    vocabulary = CLIPTokenizer.from_pretrained(folder / "tokenizer").get_vocab()
    known = {k.removeprefix("text_model."): v for k, v in known.items()}
    with torch.no_grad():
        for name, value in first.text_model.state_dict().items():
            if name != "embeddings.token_embedding.weight":
                value.copy_(known[name])
        table = known["embeddings.token_embedding.weight"]
        rows = first.text_model.embeddings.token_embedding.weight
        rows.mul_(table.std() / rows.std())
        for token, index in tokenizer.get_vocab().items():
            if token in vocabulary:
                rows[index] = table[vocabulary[token]]
        first.text_projection.weight.copy_(torch.eye(TEXT_WIDTH))
        second.text_model.embeddings.token_embedding.weight.normal_(0, 0.7)
        second.text_model.embeddings.position_embedding.weight.normal_(0, 0.3)
        second.text_projection.weight.copy_(torch.eye(WORDS_WIDTH))
    return first, second


def new_denoiser(stage: JointStage, tokenizer: CLIPTokenizer) -> Denoiser:
    """Return the transformer and text encoders of a stage."""
    model = Denoiser(new_transformer(stage.side, stage.patch), *new_text_encoders(tokenizer))
    model.transformer.set_attn_processor(CountedAttention())
    return model


def draw_sigmas(batch: int, shift: float, g: torch.Generator) -> torch.Tensor:
    """Draw stratified noise levels in (0, 1].

    Nine in ten are logit-normal, one in ten uniform, all shifted towards high noise.
    """
    u = (torch.rand(1, generator=g) + torch.arange(batch) / batch) % 1
    normal = torch.sigmoid(torch.special.ndtri((u / 0.9).clamp(1e-4, 1 - 1e-4)))
    even = ((u - 0.9) / 0.1).clamp(1e-3, 1)
    t = torch.where(u < 0.9, normal, even)
    return shift * t / (1 + (shift - 1) * t)


def draw_batch(
    pool: Pool,
    tokens: dict[str, torch.Tensor],
    stage: JointStage,
    step: int,
    batch: int,
    g: torch.Generator,
) -> Batch:
    """Draw pictures of the pool, which grows with the steps, at noise levels of the stage."""
    count = int(stage.pool[0] + stage.pool[1] * step)
    pool.grow(count)
    clean, words = [], []
    for _, pick, u, v in torch.rand(batch, 4, generator=g).tolist():
        clean.append(pool.window(int(pick * count), u, v))
        words.append(tokens[pool.captions[int(pick * count)]])
    latents = torch.stack(clean).float()
    latents = F.avg_pool2d(latents, latents.shape[-1] // stage.side)
    noise = torch.randn(latents.shape, generator=g)
    sigma = draw_sigmas(batch, stage.shift, g)
    s = sigma[:, None, None, None]
    return Batch((1 - s) * latents + s * noise, sigma, torch.stack(words), noise - latents)


def flow_loss(
    model: Denoiser, batch: Batch, nothing: torch.Tensor, g: torch.Generator
) -> torch.Tensor:
    """Compute the squared error of the velocity.

    One prompt in ten is replaced by ``nothing``, the tokens of the empty prompt.
    """
    dropped = torch.rand(len(batch.words), generator=g) < 0.1
    words = torch.where(dropped[:, None], nothing, batch.words)
    with mixed_precision():
        predicted = model(batch.noisy, batch.sigma, words)
    return F.mse_loss(predicted.float(), batch.velocity)


def optimizer_for(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of the layers of transformer and text encoders, and of all else."""
    blocks = "transformer_blocks"
    return muon(
        model,
        lambda name: (blocks in name and ".norm" not in name) or "encoder.layers" in name,
        decay=0.05,
    )
