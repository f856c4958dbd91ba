"""Merge in vLLM-Omni, in the attention backend TORCH_SDPA of its diffusion models.

    MAME_SD_VLLM_OMNI_KEEP=0.25 vllm serve MODEL --omni --diffusion-attention-backend TORCH_SDPA

vLLM-Omni calls `register` through the entry point `vllm_omni.general_plugins` in each of its
processes. Without the variable nothing changes. With it, `MergedBackend` replaces that backend and
merges the keys and values of a video, for models that say where it is in the sequence (`TELLS`,
through `AttentionMetadata.video_layout`). Other models are refused when they are built, because
their backend sees a sequence instead of an image.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.attention.backends.registry import (
    DiffusionAttentionBackendEnum,
    register_diffusion_backend,
)
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl
from vllm_omni.diffusion.config import get_current_diffusion_config_or_none

KEEP = "MAME_SD_VLLM_OMNI_KEEP"
# Pipelines of 0.30.0 whose transformers publish a video_layout (Wan's S2V doesn't).
TELLS = (
    "MiniMaxH3ModularPipeline",
    "MiniMaxH3Pipeline",
    "WanDMDPipeline",
    "WanI2VDMD2Pipeline",
    "WanImageToVideoPipeline",
    "WanPipeline",
    "WanT2VDMD2Pipeline",
    "WanVACEPipeline",
)


def register() -> None:
    """Replace TORCH_SDPA by `MergedBackend` if the variable is set.

    Raises:
        ValueError: its value isn't a share in (0, 1].
    """
    if KEEP in os.environ:
        share()
        name = f"{MergedBackend.__module__}.{MergedBackend.__qualname__}"
        register_diffusion_backend(DiffusionAttentionBackendEnum.TORCH_SDPA, name)


def share() -> float:
    """Return the share of keys to keep."""
    value = os.environ[KEEP]
    try:
        keep = float(value)
    except ValueError:
        keep = math.nan
    if not 0 < keep <= 1:
        raise ValueError(f"{KEEP}: expected a share above 0 and at most 1, got {value!r}")
    return keep


class MergedBackend(SDPABackend):
    """vLLM-Omni's backend of scaled_dot_product_attention, over merged keys and values."""

    @staticmethod
    def get_name() -> str:
        """Return the name of the replaced backend, by which the engine chooses."""
        return str(SDPABackend.get_name())

    @staticmethod
    def get_impl_cls() -> type[MergedImpl]:
        """Return its implementation."""
        return MergedImpl


class MergedImpl(SDPAImpl):
    """One attention layer.

    Raises:
        ValueError: the model's code doesn't say where its video is.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keep = share()
        config = get_current_diffusion_config_or_none()
        name = str(getattr(config, "model_class_name", None))
        if name not in TELLS:
            raise ValueError(
                f"{KEEP}: expected Wan or MiniMax H3, whose code tells the backend where the video"
                f" is, got {name}; unset {KEEP}"
            )

    def _forward_impl(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_metadata: Any = None,
        mask_mode: Any = "broadcast_k",
    ) -> Tensor:
        """Compute attention over merged keys.

        Tensors are [B, L, H, D], the output too. Calls without a layout (attention to text,
        refiners) go to the engine's own implementation.

        Raises:
            RuntimeError: this rank has only a part of the queries.
        """
        place = video_of(attn_metadata, key.shape[1])
        if place is None:
            output: Tensor = super()._forward_impl(query, key, value, attn_metadata, mask_mode)
            return output
        if query.shape != key.shape or self.causal:
            raise RuntimeError(
                f"{KEEP}: expected all of a video's queries, and as many keys and heads, got"
                f" {list(query.shape)} and {list(key.shape)}; unset {KEEP}, or --allgather-degree"
            )
        grid, start, used = place
        from mame_sd.core.attention import attention

        q, k, v = (t[:, :used].transpose(1, 2) for t in (query, key, value))
        merged: Tensor = attention(
            q,
            k,
            v,
            grid=grid,
            before=start,
            after=used - start - math.prod(grid),
            keep=self.keep,
            scale=self.softmax_scale,
        ).transpose(1, 2)
        if used == key.shape[1]:
            return merged
        # Nothing reads the padding at the end. Its queries attend to it alone, as in the packed
        # layout.
        rest = [t[:, used:] for t in (query, key, value)]
        padding: Tensor = super()._forward_impl(*rest, None, mask_mode)
        return torch.cat([merged, padding], 1)


def video_of(metadata: Any, length: int) -> tuple[tuple[int, int, int], int, int] | None:
    """Find the generated video in a sequence.

    Args:
        metadata: the engine's metadata of the call.
        length: number of tokens.

    Returns:
        Its grid (t, h, w), its first token, and the number of tokens without padding; None if the
        model doesn't say.
    """
    layout = getattr(metadata, "video_layout", None)
    if layout is None or metadata.full_attn_spans is not None:
        return None
    spans = [span for span in layout.video_spans if span.role == "target"]
    if spans:
        grid, start = spans[-1].latent_grid, spans[-1].start
    elif layout.latent_grid is not None and layout.prefix_len is not None:
        grid, start = layout.latent_grid, layout.prefix_len
    else:
        return None
    used = layout.used_len
    used = start + math.prod(grid) if used is None else used
    return (grid, start, used) if start + math.prod(grid) <= used <= length else None
