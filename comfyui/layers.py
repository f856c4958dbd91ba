"""Diffusers' names of a model's self-attentions, by their place in the engine.

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

from mame_sd import MaMeConfig

Key = tuple[Any, ...]  # ("input", 4, 0): a block, its place, a layer in it; ("double", 3)
UNET = "UNet2DConditionModel"
# By the class of ComfyUI's diffusion_model: the classes of diffusers that have these layers. Of
# each kind of block it says where ComfyUI has them and what diffusers calls their attention. A
# class that derives from one of these may have more blocks, so it is not meant.
BOTH = {
    "double": ("double_blocks", "transformer_blocks.{}.attn"),
    "single": ("single_blocks", "single_transformer_blocks.{}.attn"),
}
OF_QWEN = {"double": ("transformer_blocks", "transformer_blocks.{}.attn")}
OF_SD3 = {"double": ("joint_blocks", "transformer_blocks.{}.attn")}
OF_AURAFLOW = {
    "double": ("double_layers", "joint_transformer_blocks.{}.attn"),
    "single": ("single_layers", "single_transformer_blocks.{}.attn"),
}
FLUX = "FluxTransformer2DModel", "Flux2Transformer2DModel", "LongCatImageTransformer2DModel"
HUNYUAN = "HunyuanVideoTransformer3DModel", "HunyuanVideo15Transformer3DModel"
TRANSFORMERS: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, str]]]] = {
    "Flux": (FLUX, BOTH),
    "Chroma": (("ChromaTransformer2DModel",), BOTH),
    "HunyuanVideo": ((*HUNYUAN, "HunyuanImageTransformer2DModel"), BOTH),
    "QwenImageTransformer2DModel": (("QwenImageTransformer2DModel",), OF_QWEN),
    "WanModel": (("WanTransformer3DModel",), {"double": ("blocks", "blocks.{}.attn1")}),
    "MMDiT": (("AuraFlowTransformer2DModel",), OF_AURAFLOW),
    "OpenAISignatureMMDITWrapper": (("SD3Transformer2DModel",), OF_SD3),
}
NO_NAMES = (
    "settings: {} has no map from diffusers' layers to ComfyUI's blocks yet, so no file can mean"
    " them; leave settings empty, and give mode and keep"
)
OTHER_MODEL = (
    "calibrated_for: expected settings that were found for {}, got ones for {}; calibrate this"
    " model, or take another file"
)
UNKNOWN = "layers: expected patterns of layers of {} such as {!r}, got {!r}, which is none of them"


@dataclass(frozen=True)
class Layers:
    """A model's self-attentions.

    Attributes:
        models: Diffusers' classes that have them.
        names: Name of each one by its place in the engine, in the order in which `apply_mame`
            counts them.
    """

    models: tuple[str, ...] = ()
    names: Mapping[Key, str] = field(default_factory=dict)

    def number(self, key: Key) -> int | None:
        """Return the index of a layer, or None if there is no such layer."""
        return list(self.names).index(key) if key in self.names else None


@dataclass(frozen=True)
class Settings:
    """The settings of a model's layers.

    Args:
        config: Settings of all layers, and in `layers` those of single layers.
        layers: The model's layers; they need names if settings belong to single layers or to one
            model.
        model: Name of the model.

    Raises:
        ValueError: If the settings belong to another model, or to layers that this one lacks.
    """

    config: MaMeConfig
    layers: Layers
    model: str
    of_each: Mapping[Key, MaMeConfig | None] = field(init=False)

    def __post_init__(self) -> None:
        config, names = self.config, list(self.layers.names.values())
        if config.layers is not None or config.calibrated_for is not None:
            if not names:
                raise ValueError(NO_NAMES.format(self.model))
            described = [
                f"{model} with {len(names)} self-attentions" for model in self.layers.models
            ]
            if config.calibrated_for not in (None, *described):
                raise ValueError(OTHER_MODEL.format(" or ".join(described), config.calibrated_for))
            unknown = [] if config.layers is None else config.layers.unknown(names)
            if unknown:
                raise ValueError(UNKNOWN.format(self.model, names[0], unknown[0]))
        of_each = {key: config.of_layer(name) for key, name in self.layers.names.items()}
        object.__setattr__(self, "of_each", of_each)

    @property
    def by_layer(self) -> bool:
        """True if layers have their own settings."""
        return self.config.layers is not None

    def of(self, key: Key) -> MaMeConfig | None:
        """Return the settings of a layer, or None if it doesn't merge."""
        return self.of_each.get(key) if self.by_layer else self.config

    @property
    def every(self) -> list[MaMeConfig]:
        """Settings that some layer has."""
        return [one for one in self.of_each.values() if one] if self.by_layer else [self.config]


def layers_of_unet(unet: Any) -> Layers:
    """Return the self-attentions of ComfyUI's UNet.

    Its `input_blocks` begin with a convolution; each level follows with as many blocks as it has
    ResNets, and a downsampler. Its `output_blocks` have one ResNet more for each level. In
    diffusers' UNet the middle comes last.
    """
    names: dict[Key, str] = {}
    counts = unet.num_res_blocks
    for part, theirs, resnets_of, place, more in (
        ("input", "down_blocks", counts, 1, 0),
        ("output", "up_blocks", counts[::-1], 0, 1),
    ):
        blocks = getattr(unet, f"{part}_blocks")
        for level, resnets in enumerate(resnets_of):
            for i in range(resnets + more):
                key = part, place + i
                names |= _in_block(blocks[place + i], key, f"{theirs}.{level}", i)
            place += resnets + 1
    if unet.middle_block is not None:  # some small models have none
        names |= _in_block(unet.middle_block, ("middle", 0), "mid_block", 0)
    return Layers((UNET,), names)


def _in_block(block: Any, key: Key, path: str, place: int) -> dict[Key, str]:
    layers = sum(len(getattr(module, "transformer_blocks", ())) for module in block.modules())
    path = f"{path}.attentions.{place}.transformer_blocks"
    return {(*key, layer): f"{path}.{layer}.attn1" for layer in range(layers)}


def layers_of_transformer(model: Any) -> Layers:
    """Return the self-attentions of a transformer over its image.

    There are none if it isn't known that diffusers' layers are the same.
    """
    models, kinds = TRANSFORMERS.get(type(model).__name__, ((), {}))
    names: dict[Key, str] = {}
    for kind, (attribute, name) in kinds.items():
        for i, block in enumerate(getattr(model, attribute, ())):
            names[kind, i] = name.format(i)
            if getattr(getattr(block, "x_block", None), "x_block_self_attn", False):
                names[kind, i, 1] = name.format(i) + "2"  # SD3.5's second, over the image alone
    return Layers(models, names)


def settings_in(path: str | PathLike[str]) -> MaMeConfig:
    """Read the settings of a file, whose path is absolute or relative to ComfyUI's input folder.

    Raises:
        ValueError: If it can't be read, or has no settings.
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
