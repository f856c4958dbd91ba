"""Tiny real vision transformers, of transformers and timm: random weights, no downloads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.builders.timm_models import NEEDS_TIMM, TIMM_MODELS
from tests.builders.tiny import seeded

# Whether transformers checkpoints around whole blocks, as timm does: before 5.23.
AROUND = "__call__" in vars(GradientCheckpointingLayer)
SIDE, PATCH, DEPTH, WIDTH = 24, 4, 4, 32
PATCHES = (SIDE // PATCH) ** 2
# of a video with half of the side: 4 tubelets of 2 frames with 9 patches, as many tokens as an
# image
FRAMES = 8
_SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "initializer_range": 0.2,
}
_MLP: dict[str, Any] = {"intermediate_size": 2 * WIDTH}
_TEXT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 50,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    **_MLP,
}


@dataclass(frozen=True)
class Row:
    """One class of models.

    Attributes:
        name: of the class, and what is special.
        build: makes the model, in eval mode.
        prefix: tokens that are no patches.
        norm: the module of a block whose input is x'.
        attention: the attention of a block.
        inputs: what it is called with, of a batch and a generator.
    """

    name: str
    build: Callable[[], nn.Module]
    prefix: int
    norm: str
    attention: str
    inputs: Callable[[int, torch.Generator], dict[str, Any]]
    positional: bool = False

    def batch(self, size: int = 2, seed: int = 0) -> dict[str, Any]:
        """Return the inputs of a batch."""
        return self.inputs(size, torch.Generator().manual_seed(seed))

    def call(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of the model's output by name."""
        output = model(*inputs.values()) if self.positional else model(**inputs)
        return {"output": output} if isinstance(output, Tensor) else dict(_tensors(output))


def _tensors(output: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in output.items():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{name}.")
        elif isinstance(value, tuple) and all(isinstance(one, Tensor) for one in value):
            yield from ((f"{prefix}{name}.{place}", one) for place, one in enumerate(value))


def pixels(size: int, generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": torch.randn(size, 3, SIDE, SIDE, generator=generator)}


def frames(size: int, generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": torch.randn(size, FRAMES, 3, SIDE // 2, SIDE // 2, generator=generator)}


def noise(size: int, generator: torch.Generator) -> dict[str, Any]:
    return {**pixels(size, generator), "noise": torch.rand(size, PATCHES, generator=generator)}


def with_text(size: int, generator: torch.Generator) -> dict[str, Any]:
    return {
        **pixels(size, generator),
        "input_ids": torch.randint(2, 50, (size, 8), generator=generator),
    }


def patches(size: int, generator: torch.Generator) -> dict[str, Any]:
    values = torch.randn(size, PATCHES, 3 * PATCH * PATCH, generator=generator)
    side = SIDE // PATCH
    return {
        "pixel_values": values,
        "pixel_attention_mask": None,
        "spatial_shapes": torch.tensor([[side, side]] * size),
    }


def _of(name: str, *args: Any, **overrides: Any) -> nn.Module:
    """Build the class `name` of transformers on its own configuration with `overrides`."""
    kind = getattr(transformers, name)
    model: nn.Module = seeded(kind, 0, kind.config_class(*args, **overrides))
    return model


def _vit(name: str, prefix: int, inputs: Any = pixels, **overrides: Any) -> Row:
    return Row(
        name,
        lambda: _of(name, **{**_SIZES, **_MLP, **overrides}),
        prefix,
        "layernorm_after",
        "attention",
        inputs,
    )


def _dino(name: str, prefix: int, note: str = "", **overrides: Any) -> Row:
    sizes = {**_SIZES, "mlp_ratio": 2, "layerscale_value": 0.5, **overrides}
    return Row(name + note, lambda: _of(name, **sizes), prefix, "norm2", "attention", pixels)


def _clip(name: str, prefix: int, inputs: Any = pixels, **overrides: Any) -> Row:
    return Row(name, lambda: _of(name, **overrides), prefix, "layer_norm2", "self_attn", inputs)


_VISION = {**_SIZES, **_MLP}
del _VISION["initializer_range"]
_VIDEO: dict[str, Any] = {"image_size": SIDE // 2, "num_frames": FRAMES}
_NAFLEX = {**_VISION, "num_patches": PATCHES}
_BOTH: dict[str, Any] = {"vision_config": _VISION, "text_config": _TEXT}
ROWS = [
    _vit("ViTModel", 1),
    _vit("ViTForImageClassification", 1, num_labels=5),
    _vit("DeiTForImageClassification", 2, num_labels=5),
    _vit("DeiTForImageClassificationWithTeacher", 2, num_labels=5),
    _vit("ViTMAEModel", 1, noise, mask_ratio=0.25, decoder_num_hidden_layers=1),
    _dino("Dinov2Model", 1, ", SwiGLU", use_swiglu_ffn=True),
    _dino("Dinov2ForImageClassification", 1, num_labels=5),
    _dino("Dinov2WithRegistersForImageClassification", 5, num_labels=5, num_register_tokens=4),
    _clip("CLIPVisionModel", 1, **_VISION),
    _clip("CLIPForImageClassification", 1, **_BOTH, projection_dim=8, num_labels=5),
    _clip("CLIPModel", 1, with_text, **_BOTH, projection_dim=8),
    _clip("SiglipVisionModel", 0, **_VISION),
    _clip("SiglipForImageClassification", 0, **_BOTH, num_labels=5),
    _clip(
        "Siglip2ForImageClassification",
        0,
        patches,
        **{**_BOTH, "vision_config": _NAFLEX},
        num_labels=5,
    ),
    _vit("VideoMAEForVideoClassification", 0, frames, **_VIDEO, num_labels=5),
    _vit(
        "VivitForVideoClassification",
        1,
        frames,
        **{**_VIDEO, "tubelet_size": [2, PATCH, PATCH]},
        num_labels=5,
    ),
]
NAMED = {row.name: row for row in ROWS}
VIT = NAMED["ViTForImageClassification"]
SHALLOW = _vit("ViTForImageClassification", 1, num_labels=5, num_hidden_layers=2)  # to compile
_DEPTH: dict[str, Any] = {
    "neck_hidden_sizes": [8, 8, 8, 8],
    "fusion_hidden_size": 8,
    "reassemble_factors": [4, 2, 1, 0.5],
}
STAGES = [f"stage{number}" for number in range(1, DEPTH + 1)]


def _depth_anything() -> nn.Module:
    sizes = {**_SIZES, "mlp_ratio": 2, "layerscale_value": 0.5}
    backbone = transformers.Dinov2Config(**sizes, out_features=STAGES, reshape_hidden_states=False)
    return _of(
        "DepthAnythingForDepthEstimation",
        backbone_config=backbone,
        patch_size=PATCH,
        reassemble_hidden_size=WIDTH,
        **_DEPTH,
        head_hidden_size=8,
    )


DENSE = [  # every hidden state is read, each token at its place
    _dino("Dinov2Backbone", 1, out_features=STAGES),
    Row("DepthAnythingForDepthEstimation", _depth_anything, 1, "norm2", "attention", pixels),
    _vit("DPTForDepthEstimation", 1, is_hybrid=False, backbone_out_indices=[0, 1, 2, 3], **_DEPTH),
]


def _timm(note: str, prefix: int, kind: str = "VisionTransformer", **overrides: Any) -> Any:
    sizes = {
        "img_size": SIDE,
        "patch_size": PATCH,
        "embed_dim": WIDTH,
        "depth": DEPTH,
        "num_heads": 2,
        "num_classes": 5,
    }
    row = Row(
        f"timm {note}",
        lambda: seeded(
            getattr(TIMM_MODELS.deit if kind.endswith("Distilled") else TIMM_MODELS, kind),
            0,
            **{**sizes, **overrides},
        ),
        prefix,
        "norm2",
        "attn",
        pixels,
        positional=True,
    )
    return pytest.param(row, id=row.name, marks=NEEDS_TIMM)


TIMM = [
    _timm("ViT", 1),
    _timm("DeiT distilled", 2, "VisionTransformerDistilled"),
    _timm("registers, layer scale, mean", 5, reg_tokens=4, init_values=0.5, global_pool="avg"),
    _timm("SigLIP", 0, class_token=False, global_pool="map"),
]
EVERY = [*(pytest.param(row, id=row.name) for row in ROWS), *TIMM]


def tokens(handle: Any) -> list[float]:
    """Return the number of tokens that each block of a merged model keeps."""
    return [block.tokens_kept for block in handle.report().layers]
