"""Which models the node merges, and where the image's tokens are in a transformer's attention.

UNets are patched before their projections, by `attn1_patch`. Transformers are not patched alike
(Flux and Qwen-Image call an attn1_patch with keywords and take a dict, Wan with one dict, SD3
never), but all hand q, k and v, after rotation, to `optimized_attention_override`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UNET = "UNetModel"


@dataclass(frozen=True)
class Family:
    """How a transformer lays out the sequence [..., L, ...] of its self-attention.

    Attributes:
        name: what people call it.
        patch: the attribute that holds its patch size.
        last: the image comes after the text; else the sequence is the image alone, and others are
            left alone.
        references: tokens of reference images come after the image's.
        masked: calls with an attention mask merge; else their image starts elsewhere in each
            sample.
    """

    name: str
    patch: str = "patch_size"
    last: bool = True
    references: bool = False
    masked: bool = True


# By the class of ComfyUI's diffusion_model, or of its nearest base. None: looks like its base and
# is not.
FAMILIES: dict[str, Family | None] = {
    "Flux": Family("Flux", references=True),
    "Chroma": Family("Chroma"),
    "QwenImageTransformer2DModel": Family("Qwen-Image", references=True),
    "MMDiT": Family("SD3 or AuraFlow"),
    "NextDiT": Family("Lumina 2 or Z-Image", masked=False),
    "HunyuanVideo": Family("HunyuanVideo"),
    "WanModel": Family("Wan", last=False),
    "LTXVModel": Family("LTX-Video", patch="patchifier.patch_size", last=False),
    "LTXAVModel": None,
}
KNOWN = ", ".join(
    ["UNets (SD 1.x, SD 2.x, SDXL)", *(family.name for family in FAMILIES.values() if family)]
)


@dataclass(frozen=True)
class Transformer:
    """A model of a family.

    Attributes:
        family: how its sequence is laid out.
        patch: size of a patch along the latent's last dimensions.
        multiple: the image is padded at its end to a multiple of this many tokens.
    """

    family: Family
    patch: tuple[int, ...]
    multiple: int

    def grid(self, latent: Sequence[int]) -> tuple[int, int, int]:
        """(frames, rows, columns) of tokens of a latent of shape [B, C, ..., H, W]."""
        sizes = latent[2:]
        patch = (1,) * (len(sizes) - len(self.patch)) + self.patch
        counts = tuple(math.ceil(size / side) for size, side in zip(sizes, patch, strict=True))
        t, h, w = (1,) * (3 - len(counts)) + counts
        return t, h, w

    def padded(self, tokens: int) -> int:
        return math.ceil(tokens / self.multiple) * self.multiple

    def start(self, length: int, tokens: int, references: int) -> int | None:
        """Where the image's `tokens` begin in a sequence of `length`; None when they are not in
        it.
        """
        if not self.family.last:
            return 0 if length == tokens else None
        start = length - self.padded(tokens) - references
        return start if start >= 0 else None


@dataclass(frozen=True)
class UNet:
    """A UNet.

    Attributes:
        numbers: of its self-attentions, as `apply_mame` counts them, by block, its place, and the
            layer in it, as the engine names them.
    """

    numbers: Mapping[tuple[str, int, int], int]


def layout_of(model: Any) -> UNet | Transformer:
    """How to merge in ComfyUI's `diffusion_model`.

    Raises:
        ValueError: it is neither a UNet nor a transformer that merges.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's
    bases = [base.__name__ for base in type(model).__mro__]
    if UNET in bases:
        return UNet(_numbers(model))
    family = next((FAMILIES[base] for base in bases if base in FAMILIES), None)
    if family is None:
        raise ValueError(
            f"MaMe token merging: expected one of {KNOWN}, got {bases[0]}; take the node out of"
            " this model's path"
        )
    if any(
        getattr(block, "flipped_img_txt", False) for block in getattr(model, "double_blocks", ())
    ):
        raise ValueError(
            f"MaMe token merging: expected {family.name} with its text before its image, got the"
            " older order; update ComfyUI, or take the node out of this model's path"
        )
    patch: Any = model
    for name in family.patch.split("."):
        patch = getattr(patch, name)
    patch = (patch, patch) if isinstance(patch, int) else tuple(patch)
    return Transformer(family, patch, getattr(model, "pad_tokens_multiple", None) or 1)


def _numbers(unet: Any) -> dict[tuple[str, int, int], int]:
    """See `UNet`. In diffusers' UNet the middle comes last."""
    numbers: dict[tuple[str, int, int], int] = {}
    parts = {
        "input": unet.input_blocks,
        "output": unet.output_blocks,
        "middle": [unet.middle_block],
    }
    for name, blocks in parts.items():
        for place, block in enumerate(blocks):
            modules = () if block is None else block.modules()  # some small models have no middle
            layers = sum(len(getattr(module, "transformer_blocks", ())) for module in modules)
            numbers |= {(name, place, layer): len(numbers) + layer for layer in range(layers)}
    return numbers
