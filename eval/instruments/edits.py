"""Edit drawn pictures with a small transformer of Flux's form.

It is the embedded transformer, trained further to read a reference image's tokens behind its own,
as FLUX.1 Kontext does. A caption says what the edited picture shows: the reference with another
ground or another object.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mame_sd.embedded.model import embedded_model_path
from mame_sd.eval.instruments.models import WEIGHTS, dequantized, join_files

SIDE, PATCH = 64, 2  # latents a side of a picture, and of a token
GRID = SIDE // PATCH
WIDTH, CHANNELS = 256, 4
TEXT = 64  # tokens of a caption, padded by zeros
FLAG = 8.0  # that a token is a reference's; at 1 training would learn it slowly
AXES = (16, 24, 24)  # of the rotary positions: image, row, column


class Editor(nn.Module):
    """The transformer and how to ask it.

    Attributes:
        model: diffusers' `FluxTransformer2DModel`. A token is its 2 x 2 latents, the sines of its
            place, which the embedded transformer adds, and 1 for tokens of a reference.
    """

    places: Tensor  # what the embedded transformer adds to its tokens [GRID, GRID, WIDTH]

    def __init__(self) -> None:
        super().__init__()
        from diffusers import FluxTransformer2DModel, SD3Transformer2DModel

        own = SD3Transformer2DModel.from_pretrained(
            embedded_model_path("transformer") / "transformer"
        )
        self.model: Any = FluxTransformer2DModel(
            patch_size=1,
            in_channels=CHANNELS * PATCH**2 + WIDTH + 1,
            out_channels=CHANNELS * PATCH**2,
            num_layers=len(own.transformer_blocks),
            num_single_layers=0,
            attention_head_dim=64,
            num_attention_heads=WIDTH // 64,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            axes_dims_rope=AXES,
        )
        self.model.load_state_dict(as_flux(own))
        places = own.pos_embed.pos_embed.reshape(GRID, GRID, WIDTH).clone()
        self.register_buffer("places", places, persistent=False)

    def forward(
        self,
        noisy: Tensor,
        time: Tensor,
        references: Tensor,
        words: Tensor,
        pooled: Tensor,
        corner: tuple[int, int] = (0, 0),
    ) -> Tensor:
        """Return the velocity, noise less the clean latents [B, 4, h, w].

        Args:
            noisy: (1 - time) * clean + time * noise [B, 4, h, w].
            time: share of the noise, 0 to 1 [B].
            references: clean latents of the reference images [B, R, 4, h, w].
            words: states of the captions' tokens (`captions_states`), [B, TEXT, 256].
            pooled: states of the captions, [B, 256].
            corner: row and column of the first token, if the latents are a part of a picture.
        """
        images = [noisy, *references.unbind(1)]
        batch, (h, w) = len(noisy), (side // PATCH for side in noisy.shape[-2:])
        (row, column), count = corner, h * w
        places = self.places[row : row + h, column : column + w].flatten(0, 1).expand(batch, -1, -1)
        at = torch.cartesian_prod(row + torch.arange(h), column + torch.arange(w))
        tokens, ids = [], []
        for number, image in enumerate(images):
            flag = places.new_full((batch, count, 1), FLAG * (number > 0))
            tokens.append(torch.cat([packed(image), places, flag], -1))
            ids.append(F.pad(at, (1, 0), value=number))
        out = self.model(
            torch.cat(tokens, 1),
            words,
            pooled,
            time,
            torch.cat(ids),
            torch.zeros(words.shape[1], 3),
            return_dict=False,
        )[0]
        return unpacked(out[:, :count], h)


def load_editor(folder: Path = WEIGHTS) -> Editor:
    """Return the trained instrument in fp32 and eval mode.

    Raises:
        UserError: files that are missing.
    """
    editor = Editor()
    editor.model.load_state_dict(dequantized(join_files("edits", folder)), strict=False)
    return editor.eval().requires_grad_(False)


def packed(x: Tensor) -> Tensor:
    """Return latents [B, 4, H, W] as tokens [B, L, 16]."""
    return F.pixel_unshuffle(x, PATCH).flatten(2).transpose(1, 2)


def unpacked(tokens: Tensor, rows: int) -> Tensor:
    """Return tokens [B, L, 16] as latents [B, 4, H, W]."""
    return F.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (rows, -1)), PATCH)


@torch.no_grad()
def as_flux(own: Any) -> dict[str, Tensor]:
    """Return the weights of a transformer of Stable Diffusion 3's form for Flux's form."""
    found = {k: v.clone() for k, v in own.state_dict().items() if not k.startswith("pos_embed")}
    weight = own.pos_embed.proj.weight.flatten(1)  # [WIDTH, 16]
    eye, zero = torch.eye(WIDTH), torch.zeros(WIDTH, 1)
    found["x_embedder.weight"] = torch.cat([weight, eye, zero], 1)
    found["x_embedder.bias"] = own.pos_embed.proj.bias.clone()
    for part in ("weight", "bias"):  # from rows, columns, channels to channels, rows, columns
        last = found[f"proj_out.{part}"]
        found[f"proj_out.{part}"] = (
            last.unflatten(0, (PATCH, PATCH, CHANNELS)).movedim(2, 0).flatten(0, 2)
        )
    last = f"transformer_blocks.{len(own.transformer_blocks) - 1}."
    for part in ("weight", "bias"):  # its text has no output, so all but shift and scale is zero
        scale, shift = found[f"{last}norm1_context.linear.{part}"].chunk(2)
        zeros = torch.zeros_like(shift).repeat(4, *[1] * (shift.ndim - 1))
        found[f"{last}norm1_context.linear.{part}"] = torch.cat([shift, scale, zeros])
    before = "transformer_blocks.0."
    for key in [k for k in found if k.startswith(before)]:
        name = last + key.removeprefix(before)
        if name not in found:
            found[name] = torch.zeros_like(found[key])
    return found


@lru_cache(maxsize=1)
def _encoders() -> tuple[Any, Any, Any]:
    from transformers import CLIPTextModelWithProjection, CLIPTokenizer

    folder = embedded_model_path("transformer")
    encoders = (
        CLIPTextModelWithProjection.from_pretrained(folder / name, dtype=torch.float32).eval()
        for name in ("text_encoder", "text_encoder_2")
    )
    return (CLIPTokenizer.from_pretrained(folder / "tokenizer"), *encoders)


@torch.no_grad()
def captions_states(captions: list[str]) -> tuple[Tensor, Tensor]:
    """Return the states of captions: words [B, TEXT, 256] and pooled [B, 256]."""
    tokenizer, *encoders = _encoders()
    given = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    tokens = tokenizer(captions, **given).input_ids
    states = [encoder(tokens, output_hidden_states=True) for encoder in encoders]
    words = torch.cat([state.hidden_states[-2] for state in states], -1)
    pooled = torch.cat([state.text_embeds for state in states], -1)
    return F.pad(words, (0, 0, 0, TEXT - words.shape[1])), pooled
