"""Name a model's self-attentions and MLPs as diffusers does, by their place in the engine.

Files of calibration have settings by these names. Only models whose layers are known to be the same
ones have names, because a file must mean the layers that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from mame_sd import MaMeConfig
from mame_sd.core.min_tokens import kernel_of, too_wide

from .run import KEEPS_ALL, SMALL

Key = tuple[Any, ...]  # ("input", 4, 0): a block, its place, a layer in it; ("double", 3)
UNET = "UNet2DConditionModel"
# By the class of ComfyUI's diffusion_model: the classes of diffusers that have these layers. Of
# each kind of block it says where ComfyUI has them, what diffusers calls their attention and their
# MLP, and where ComfyUI has the MLP of the image; there is none where it is fused with attention. A
# class that derives from one of these may have more blocks, so it is not meant.
Kinds = dict[str, tuple[str, str, str, str]]
BOTH: Kinds = {
    "double": ("double_blocks", "transformer_blocks.{}.attn", "ff", "img_mlp"),
    "single": ("single_blocks", "single_transformer_blocks.{}.attn", "", ""),
}
OF_QWEN: Kinds = {
    "double": ("transformer_blocks", "transformer_blocks.{}.attn", "img_mlp", "img_mlp")
}
OF_SD3: Kinds = {"double": ("joint_blocks", "transformer_blocks.{}.attn", "ff", "x_block.mlp")}
OF_AURAFLOW: Kinds = {
    "double": ("double_layers", "joint_transformer_blocks.{}.attn", "ff", "mlpX"),
    "single": ("single_layers", "single_transformer_blocks.{}.attn", "ff", "mlp"),
}
OF_WAN: Kinds = {"double": ("blocks", "blocks.{}.attn1", "ffn", "ffn")}
FLUX = "FluxTransformer2DModel", "Flux2Transformer2DModel", "LongCatImageTransformer2DModel"
HUNYUAN = "HunyuanVideoTransformer3DModel", "HunyuanVideo15Transformer3DModel"
TRANSFORMERS: dict[str, tuple[tuple[str, ...], Kinds]] = {
    "Flux": (FLUX, BOTH),
    "Chroma": (("ChromaTransformer2DModel",), BOTH),
    "HunyuanVideo": ((*HUNYUAN, "HunyuanImageTransformer2DModel"), BOTH),
    "QwenImageTransformer2DModel": (("QwenImageTransformer2DModel",), OF_QWEN),
    "WanModel": (("WanTransformer3DModel",), OF_WAN),
    "MMDiT": (("AuraFlowTransformer2DModel",), OF_AURAFLOW),
    "OpenAISignatureMMDITWrapper": (("SD3Transformer2DModel",), OF_SD3),
}
NO_NAMES = (
    "settings: {} has no map from diffusers' layers to ComfyUI's blocks yet, so no file can mean"
    " them; leave settings empty, and give mode and keep"
)
OTHER_MODEL = (
    "calibrated_for: expected settings that were found for {}, got ones for {}; calibrate this"
    " model, or give another file"
)
UNKNOWN = "layers: expected patterns of layers of {} such as {!r}, got {!r}, which is none of them"


@dataclass(frozen=True)
class Layers:
    """A model's self-attentions and MLPs.

    Attributes:
        models: diffusers' classes that have them.
        names: name of each self-attention by its place in the engine, in the order in which
            `apply_mame` counts them.
        mlps: path in the engine's model and name of each MLP of the image, by the place of its
            block.
    """

    models: tuple[str, ...] = ()
    names: Mapping[Key, str] = field(default_factory=dict)
    mlps: Mapping[Key, tuple[str, str]] = field(default_factory=dict)

    def number(self, key: Key) -> int | None:
        """Return the index of a layer, or None if there is no such layer."""
        return list(self.names).index(key) if key in self.names else None

    def block_number(self, key: Key) -> int:
        """Return the index of the block of an MLP, as `apply_mame` counts blocks."""
        blocks = dict.fromkeys(name.rpartition(".")[0] for name in self.names.values())
        return list(blocks).index(self.mlps[key][1].rpartition(".")[0])


@dataclass(frozen=True)
class Settings:
    """The settings of a model's layers.

    Args:
        config: settings of all layers, and in `layers` those of single layers.
        layers: the model's layers; they need names if settings belong to single layers or to one
            model.
        model: name of the model.

    Raises:
        ValueError: the settings belong to another model, or to layers that this one lacks.
    """

    config: MaMeConfig
    layers: Layers
    model: str
    of_each: Mapping[Key, MaMeConfig | None] = field(init=False)
    of_mlps: Mapping[Key, MaMeConfig | None] = field(init=False)

    def __post_init__(self) -> None:
        config, names = self.config, list(self.layers.names.values())
        mlps = {key: name for key, (_, name) in self.layers.mlps.items()}
        if config.layers is not None or config.calibrated_for is not None:
            if not names:
                raise ValueError(NO_NAMES.format(self.model))
            described = [
                f"{model} with {len(names)} self-attentions" for model in self.layers.models
            ]
            if config.calibrated_for not in (None, *described):
                raise ValueError(OTHER_MODEL.format(" or ".join(described), config.calibrated_for))
            unknown = (
                [] if config.layers is None else config.layers.unknown([*names, *mlps.values()])
            )
            if unknown:
                raise ValueError(UNKNOWN.format(self.model, names[0], unknown[0]))
        of_each = {key: config.of_layer(name) for key, name in self.layers.names.items()}
        object.__setattr__(self, "of_each", of_each)
        of_mlps = {key: config.of_layer(name) for key, name in mlps.items()}
        object.__setattr__(self, "of_mlps", of_mlps)

    @property
    def by_layer(self) -> bool:
        """Return True if layers have their own settings."""
        return self.config.layers is not None

    def of(self, key: Key) -> MaMeConfig | None:
        """Return the settings of a layer, or None if it doesn't merge."""
        return self.of_each.get(key) if self.by_layer else self.config

    def of_mlp(self, key: Key) -> MaMeConfig | None:
        """Return the settings of the MLP of a block, or None if it isn't restored."""
        return self.of_mlps.get(key) if self.by_layer else self.config

    @property
    def every(self) -> list[MaMeConfig]:
        """Return the settings that some layer has."""
        own = (*self.of_each.values(), *self.of_mlps.values())
        return [one for one in own if one] if self.by_layer else [self.config]


def layers_of_unet(unet: Any) -> Layers:
    """Return the self-attentions of ComfyUI's UNet.

    Its `input_blocks` begin with a convolution; each level follows with as many blocks as it has
    ResNets, and a downsampler. Its `output_blocks` have one ResNet more for each level. In
    diffusers' UNet the middle comes last.
    """
    layers: dict[Key, tuple[str, str]] = {}  # path in the engine's model, name of diffusers' block
    counts = unet.num_res_blocks
    for part, theirs, resnets_of, place, more in (
        ("input", "down_blocks", counts, 1, 0),
        ("output", "up_blocks", counts[::-1], 0, 1),
    ):
        blocks = getattr(unet, f"{part}_blocks")
        for level, resnets in enumerate(resnets_of):
            for i in range(resnets + more):
                path, name = f"{part}_blocks.{place + i}", f"{theirs}.{level}.attentions.{i}"
                layers |= _in_block(blocks[place + i], (part, place + i), path, name)
            place += resnets + 1
    if unet.middle_block is not None:  # some small models have none
        name = "mid_block.attentions.0"
        layers |= _in_block(unet.middle_block, ("middle", 0), "middle_block", name)
    return Layers(
        (UNET,),
        {key: f"{name}.attn1" for key, (_, name) in layers.items()},
        {key: (f"{path}.ff", f"{name}.ff") for key, (path, name) in layers.items()},
    )


def _in_block(block: Any, key: Key, path: str, name: str) -> dict[Key, tuple[str, str]]:
    found = [
        (f"{path}.{inner}" if inner else path, i)
        for inner, module in block.named_modules()
        for i in range(len(getattr(module, "transformer_blocks", ())))
    ]
    return {
        (*key, layer): (f"{where}.transformer_blocks.{i}", f"{name}.transformer_blocks.{layer}")
        for layer, (where, i) in enumerate(found)
    }


def layers_of_transformer(model: Any) -> Layers:
    """Return the self-attentions of a transformer over its image, and the MLPs next to them.

    There are none if it isn't known that diffusers' layers are the same.
    """
    models, kinds = TRANSFORMERS.get(type(model).__name__, ((), {}))
    names: dict[Key, str] = {}
    mlps: dict[Key, tuple[str, str]] = {}
    for kind, (attribute, name, mlp, path) in kinds.items():
        for i, block in enumerate(getattr(model, attribute, ())):
            names[kind, i] = own = name.format(i)
            if mlp:
                mlps[kind, i] = f"{attribute}.{i}.{path}", f"{own.rpartition('.')[0]}.{mlp}"
            if getattr(getattr(block, "x_block", None), "x_block_self_attn", False):
                names[kind, i, 1] = own + "2"  # SD3.5's second, over only the image
    return Layers(models, names, mlps)


def left_alone(
    config: MaMeConfig, k: Tensor, tokens: int, channels: int, width: int
) -> tuple[Any, ...]:
    """Return why a layer doesn't merge, as arguments of `Run.note_left`; empty if it may merge.

    Args:
        config: the settings of the layer.
        k: keys, or the input of their projection.
        tokens: number of the image's tokens.
        channels: number of channels of all heads.
        width: number of channels of a head.
    """
    least = config.min_tokens
    if least is None:
        least = kernel_of(k.device, k.dtype, width).least
    if tokens < least:
        return SMALL, tokens, least
    if config.keep == 1:
        return (KEEPS_ALL,)
    by_default = config.is_default and config.min_tokens is None
    reason = too_wide(tokens, channels) if by_default else ""
    return (reason,) if reason else ()


def settings_in(path: str | PathLike[str]) -> MaMeConfig:
    """Read the settings of a file, whose path is absolute or relative to ComfyUI's input folder.

    Raises:
        ValueError: it can't be read, or has no settings.
    """
    try:
        return MaMeConfig.from_file(place_of(path))
    except ValueError as error:
        raise ValueError(f"settings: {error}") from None


def place_of(path: str | PathLike[str]) -> Path:
    """Return the absolute path of a file of settings."""
    try:
        folders = import_module("folder_paths")  # ComfyUI's
    except ImportError:
        return Path(path)
    return Path(folders.get_input_directory()) / path
