"""The transformer with joint attention: its parts, what it learns from, and how it grows from
coarse to fine tokens.
"""

import json
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from mame_sd.embedded import model as subjects

from . import world
from .loop import generator, mixed_precision, muon
from .pool import Pool
from .text import TEXT_WIDTH, new_tokenizer

WIDTH, HEADS, BLOCKS = 256, 4, 6
WORDS_WIDTH = 64  # of the second text encoder
TEXT_LENGTH = 20  # tokens of a prompt
IDLE = 256  # zero tokens that StableDiffusion3Pipeline puts after the prompt's when it has no T5
# tokens below which attention in three operations trains 2 to 4 times as fast as the fused one on a
# CPU
WRITTEN_OUT = 512
POSITIONS = 16.0  # side of the picture in the units of the position embedding, at every grid
SHIFT = 6.0  # of the scheduler: 64 x 64 latents are decided in high noise


@dataclass(frozen=True)
class Stage:
    """One stage: latents averaged to ``side`` x ``side``, cut into patches of ``patch``."""

    name: str
    side: int
    patch: int
    steps: int
    batch: int
    lr: float  # of Muon; AdamW's is a tenth
    shift: float  # of the noise levels it learns at: more is noisier
    pool: tuple[int, float]  # scenes at the first step, and more per step
    decay: float = (
        0.2  # the last share of the steps, over which the learning rate falls to a hundredth
    )
    warmup: int = 100
    ema: float = 0.998
    pairs: float = 0.0  # share of pictures with two glyphs


class Denoiser(torch.nn.Module):
    """What is trained: the transformer and its two text encoders."""

    def __init__(
        self,
        transformer: SD3Transformer2DModel,
        text_encoder: CLIPTextModelWithProjection,
        text_encoder_2: CLIPTextModelWithProjection,
    ) -> None:
        super().__init__()
        self.transformer, self.text_encoder, self.text_encoder_2 = (
            transformer,
            text_encoder,
            text_encoder_2,
        )

    def forward(
        self, noisy: torch.Tensor, sigma: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """As the pipeline calls it, the ``IDLE`` zero tokens counted instead of repeated
        (`counted_attention`).
        """
        one, two = (
            e(tokens, output_hidden_states=True) for e in (self.text_encoder, self.text_encoder_2)
        )
        words = torch.cat([one.hidden_states[-2], two.hidden_states[-2]], -1)
        words = F.pad(words, (0, 0, 0, 1))
        pooled = torch.cat([one.text_embeds, two.text_embeds], -1)
        return self.transformer(noisy, words, pooled, sigma * 1000, return_dict=False)[0]


class CountedAttention:
    """Joint attention in which the last token stands for ``IDLE`` equal ones: the same output, at a
    fifth of the cost.

    Equal tokens stay equal in every layer, and n equal keys weigh as much as one whose logit is
    greater by log n.
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
        query = torch.cat(
            [
                attn.norm_q(heads(attn.to_q(hidden_states))),
                attn.norm_added_q(heads(attn.add_q_proj(text))),
            ],
            2,
        )
        key = torch.cat(
            [
                attn.norm_k(heads(attn.to_k(hidden_states))),
                attn.norm_added_k(heads(attn.add_k_proj(text))),
            ],
            2,
        )
        value = torch.cat([heads(attn.to_v(hidden_states)), heads(attn.add_v_proj(text))], 2)
        count = torch.zeros(key.shape[2], dtype=value.dtype)
        count[-1] = math.log(IDLE)
        query, key = query.to(value.dtype), key.to(value.dtype)
        if key.shape[2] < WRITTEN_OUT:
            scores = query @ key.transpose(2, 3) / math.sqrt(key.shape[3]) + count
            out = scores.softmax(-1) @ value
        else:
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=count.expand(1, 1, key.shape[2], -1)
            )
        out = out.transpose(1, 2).flatten(2)
        image, words = out[:, : hidden_states.shape[1]], out[:, hidden_states.shape[1] :]
        image = attn.to_out[0](image)
        return image, (words if attn.context_pre_only else attn.to_add_out(words))


def position_embedding(grid: int) -> torch.Tensor:
    """[1, grid * grid, WIDTH]: sines and cosines of the tokens' centres, in units that do not
    depend on the grid.
    """
    at = (torch.arange(grid, dtype=torch.float64) + 0.5) * POSITIONS / grid
    rate = 1 / 10000 ** (torch.arange(WIDTH // 4, dtype=torch.float64) / (WIDTH // 4))
    waves = torch.cat([(at[:, None] * rate).sin(), (at[:, None] * rate).cos()], 1)
    across, down = waves[None].expand(grid, -1, -1), waves[:, None].expand(-1, grid, -1)
    return torch.cat([across, down], -1).flatten(0, 1)[None].float()


def new_transformer(side: int, patch: int) -> SD3Transformer2DModel:
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
        for block in model.transformer_blocks:
            for norm in (block.norm1, block.norm1_context):
                norm.linear.weight.zero_()
                norm.linear.bias.zero_()
        model.norm_out.linear.weight.zero_()
        model.norm_out.linear.bias.zero_()
        model.proj_out.weight.zero_()
        model.proj_out.bias.zero_()
    return model


def joint_tokenizer() -> CLIPTokenizer:
    """The embedded model's words and those of the grounds; prompts are cut at `TEXT_LENGTH`
    tokens.
    """
    tokenizer = new_tokenizer(world.all_captions())
    return CLIPTokenizer(
        vocab=tokenizer.get_vocab(), merges=_merges(tokenizer), model_max_length=TEXT_LENGTH
    )


def _merges(tokenizer: CLIPTokenizer) -> list[tuple[str, str]]:
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in merges]


def new_text_encoders(
    tokenizer: CLIPTokenizer,
) -> tuple[CLIPTextModelWithProjection, CLIPTextModelWithProjection]:
    """The embedded model's text encoder as it was trained, in a vocabulary with more words, and a
    small one without context.

    The pipeline wants two and reads the last hidden state but one. Of the first that is the words
    in their context. Of the second, with its single layer, it is the words as they are.
    """

    def config(width: int, layers: int) -> CLIPTextConfig:
        return CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            max_position_embeddings=77,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            projection_dim=width,
        )

    first, second = (
        CLIPTextModelWithProjection(config(*shape)) for shape in ((TEXT_WIDTH, 3), (WORDS_WIDTH, 1))
    )
    known = CLIPTextModel.from_pretrained(
        subjects.embedded_model_path() / "text_encoder", dtype=torch.float32
    ).state_dict()
    vocabulary = CLIPTokenizer.from_pretrained(
        subjects.embedded_model_path() / "tokenizer"
    ).get_vocab()
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


def new_denoiser(stage: Stage, tokenizer: CLIPTokenizer) -> Denoiser:
    model = Denoiser(new_transformer(stage.side, stage.patch), *new_text_encoders(tokenizer))
    model.transformer.set_attn_processor(CountedAttention())
    return model


def new_scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=SHIFT)


def draw_sigmas(batch: int, shift: float, g: torch.Generator) -> torch.Tensor:
    """Noise levels in (0, 1], stratified: nine in ten logit-normal, one in ten even, all shifted
    towards high noise.
    """
    u = (torch.rand(1, generator=g) + torch.arange(batch) / batch) % 1
    normal = torch.sigmoid(torch.special.ndtri((u / 0.9).clamp(1e-4, 1 - 1e-4)))
    even = ((u - 0.9) / 0.1).clamp(1e-3, 1)
    t = torch.where(u < 0.9, normal, even)
    return shift * t / (1 + (shift - 1) * t)


def draw_batch(
    pools: dict[str, Pool],
    tokens: dict[str, torch.Tensor],
    stage: Stage,
    step: int,
    batch: int,
    g: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clean latents [batch, 4, side, side] and the tokens of their captions.

    The first pool grows with the steps, that of the pairs a quarter as fast; a pool of held-out
    scenes is taken as it is.
    """
    count = int(stage.pool[0] + stage.pool[1] * step)
    clean, words = [], []
    for paired, pick, u, v in torch.rand(batch, 4, generator=g).tolist():
        kind = "pairs" if paired < stage.pairs else next(iter(pools))
        pool = pools[kind]
        limit = (
            len(pool.captions) if kind == "held-out" else count // 4 if kind == "pairs" else count
        )
        pool.grow(limit)
        index = int(pick * limit)
        clean.append(pool.window(index, u, v))
        words.append(tokens[pool.captions[index]])
    latents = torch.stack(clean).float()
    return F.avg_pool2d(latents, latents.shape[-1] // stage.side), torch.stack(words)


def flow_loss(
    model: Denoiser,
    pools: dict[str, Pool],
    tokens: dict[str, torch.Tensor],
    stage: Stage,
    seed: int,
    step: int,
) -> torch.Tensor:
    g = generator(seed, stage.name, step)
    clean, words = draw_batch(pools, tokens, stage, step, stage.batch, g)
    noise = torch.randn(clean.shape, generator=g)
    sigma = draw_sigmas(stage.batch, stage.shift, g)
    words[torch.rand(stage.batch, generator=g) < 0.1] = tokens[""]
    s = sigma[:, None, None, None]
    with mixed_precision():
        predicted = model((1 - s) * clean + s * noise, sigma, words)
    return F.mse_loss(predicted.float(), noise - clean)


def optimizer_for(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Of the layers of the transformer and of the text encoders, and of all else."""
    blocks = "transformer_blocks"
    return muon(
        model,
        lambda name: (blocks in name and ".norm" not in name) or "encoder.layers" in name,
        decay=0.05,
    )


def learning_rate(stage: Stage, step: int) -> float:
    """Linear warm-up, constant, linear fall: a stage can be given more steps while it is
    constant.
    """
    left = (stage.steps - step) / max(1, stage.decay * stage.steps)
    return stage.lr * min(1.0, (step + 1) / stage.warmup) * max(0.01, min(1.0, left))
