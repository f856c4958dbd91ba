"""List the models that the node merges, and the place of the image's tokens in their attention.

All of them pass q, k and v to `optimized_attention_override` after rotation. Only UNets have an
`attn1_patch` before their projections, in which whole tokens can merge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mame_sd.refused import COMFYUI, UNKNOWN_PLACE, known_as

from .layers import Layers, layers_of_transformer, layers_of_unet

UNET = "UNetModel"


@dataclass(frozen=True)
class Family:
    """Layout of the sequence [..., L, ...] of a transformer's self-attention.

    Attributes:
        name: its usual name.
        patch: the attributes that hold its patch size, one for all sides or one for each; empty if
            each of the latent's pixels is a token.
        image: "last" if the image comes after any other tokens, "first" if before them, "alone" if
            its sequence holds nothing else.
        references: where tokens of reference images are: "behind" the image, "before" it among the
            others, or nowhere.
        masked: True if calls with an attention mask merge; otherwise their image starts elsewhere
            in each sample.
        unnamed: True if the engine doesn't say which of its blocks attends, but lets each be
            replaced.
    """

    name: str
    patch: str = "patch_size"
    image: Literal["last", "first", "alone"] = "last"
    references: Literal["", "behind", "before"] = ""
    masked: bool = True
    unnamed: bool = False


COSMOS = "patch_temporal patch_spatial patch_spatial"
# By the class of ComfyUI's diffusion_model, or of its nearest base.
FAMILIES: dict[str, Family] = {
    "Flux": Family("Flux", references="behind"),
    "Chroma": Family("Chroma"),
    "QwenImageTransformer2DModel": Family("Qwen-Image", references="behind"),
    "OpenAISignatureMMDITWrapper": Family("SD3", unnamed=True),
    "MMDiT": Family("AuraFlow", unnamed=True),
    "NextDiT": Family("Lumina 2 or Z-Image", references="before", masked=False),
    "HunyuanVideo": Family("HunyuanVideo"),
    "SingleStreamDiT": Family("Krea 2", "patch", references="behind"),
    "Ideogram4Transformer2DModel": Family("Ideogram 4", ""),
    "HiDreamImageTransformer2DModel": Family("HiDream", image="first"),
    "OmniGen2Transformer2DModel": Family("OmniGen 2", references="before"),
    "Kandinsky5": Family("Kandinsky 5", image="alone"),
    "GeneralDIT": Family("Cosmos", COSMOS, "alone"),
    "MiniTrainDIT": Family("Cosmos Predict2 or Anima", COSMOS, "alone"),
    "AsymmDiTJoint": Family("Mochi", image="first"),
    "CogVideoXTransformer3DModel": Family("CogVideoX", "patch_size_t patch_size patch_size"),
    "WanModel": Family("Wan", image="first"),
    "LTXVModel": Family("LTX-Video", "patchifier.patch_size", "alone"),
    "LTXAVModel": Family("LTX-2", "patchifier.patch_size", "alone"),
    # Text, references and sound before the video. Those with keyframes have them there too.
    "MiniMaxH3Model": Family("MiniMax H3"),
}


@dataclass(frozen=True)
class Place:
    """The place of the image in the sequences of one call of the model.

    Attributes:
        grid: (frames, rows, columns) of its tokens.
        padded: number of tokens that it is padded to.
        least: smallest number of other tokens in a sequence that contains everything.
        most: largest number of other tokens in such a sequence.
        before: where it begins. If None, it ends the sequence except for the tokens `behind` it.
        behind: number of tokens behind it.
    """

    grid: tuple[int, int, int]
    padded: int
    least: float
    most: float = math.inf
    before: int | None = None
    behind: int = 0

    def start(self, length: int) -> int | None:
        """Return where the image begins in a sequence of `length`, or None if it isn't in it."""
        others = length - self.padded
        if not self.least <= others <= self.most:
            return None
        return others - self.behind if self.before is None else self.before


@dataclass(frozen=True)
class Transformer:
    """A model of a family.

    Attributes:
        family: the layout of its sequence.
        patch: size of a patch along the latent's last dimensions.
        multiple: each image and prompt is padded at its end to a multiple of this number of tokens.
        reference_frame: True if it puts the tokens of `reference_latent` before the video.
        reference_method: what it does with reference images if the call doesn't say. If None, it
            leaves them out.
        sees: for Z-Image Omni, True if it gets SigLIP's features of the references.
    """

    family: Family
    patch: tuple[int, ...]
    multiple: int
    reference_frame: bool = False
    reference_method: Any = ""
    sees: bool = False

    def grid(self, latent: Sequence[int]) -> tuple[int, int, int]:
        """Return (frames, rows, columns) of tokens of a latent of shape [B, C, ..., H, W]."""
        sizes = latent[2:]
        patch = ((1,) * len(sizes) + self.patch)[-len(sizes) :]
        counts = tuple(math.ceil(size / side) for size, side in zip(sizes, patch, strict=True))
        t, h, w = (1,) * (3 - len(counts)) + counts
        return t, h, w

    def padded(self, tokens: int) -> int:
        """Return a number of tokens after padding."""
        return math.ceil(tokens / self.multiple) * self.multiple

    def tokens(self, latents: Sequence[Any]) -> int:
        """Return the number of tokens of images with these latents, each padded."""
        return sum(self.padded(math.prod(self.grid(latent.shape))) for latent in latents)

    def text(self, prompt: Any, arguments: Mapping[str, Any]) -> int:
        """Return the number of tokens of a call's prompts, each padded.

        Args:
            prompt: the first prompt.
            arguments: the other arguments of the call by name.
        """
        parts = [part for part in (prompt, arguments.get("direct_context")) if part is not None]
        counts = [sum(part.shape[1] for part in parts)]
        counts += [
            1 if part is None else part.shape[1] for part in arguments.get("ref_contexts") or ()
        ]
        return sum(map(self.padded, counts))

    def seen(self, arguments: Mapping[str, Any]) -> int:
        """Return the number of tokens of SigLIP's features in Z-Image Omni.

        Each reference has some, and the image itself has none. Each is padded, and an empty one
        takes one pad.
        """
        references = arguments.get("ref_latents") or ()
        features = [*(arguments.get("siglip_feats") or ()), *[None] * len(references)]
        sizes = [1 if one is None else one.shape[1] * one.shape[2] for one in features]
        return sum(map(self.padded, (*sizes[: len(references)], 1))) if self.sees else 0

    def place(self, latent: Sequence[int], arguments: Mapping[str, Any], text: int) -> Place:
        """Return the place of the image.

        Args:
            latent: shape of the model's latents.
            arguments: the other arguments of the call by name.
            text: tokens of the prompts, each padded.
        """
        if arguments.get("latent_shapes"):  # LTX-2: video and sound in one latent
            latent = arguments["latent_shapes"][0]
        if arguments.get("image_cond") is not None and self.family.name == "HiDream":
            latent = (*latent[:-1], latent[-1] + arguments["image_cond"].shape[-1])
        grid = self.grid(latent)
        padded, family = self.padded(math.prod(grid)), self.family
        references = 0
        if (
            family.references
            and arguments.get("ref_latents_method", self.reference_method) is not None
        ):
            references = self.tokens(arguments.get("ref_latents") or ())
        if family.image == "alone":
            return Place(grid, padded, 0, 0)
        if family.image == "first":
            frame = arguments.get("reference_latent") if self.reference_frame else None
            before = 0 if frame is None else self.tokens([frame])
            return Place(grid, padded, before, before=before)
        if family.references == "behind":
            return Place(grid, padded, references, behind=references)
        if arguments.get("ref_frames"):  # Ming-Image: references in one sequence with its frames
            return Place(grid, padded, math.inf)
        if self.multiple > 1 and references:
            others = text + references + self.seen(arguments)
            return Place(grid, padded, others, others)
        return Place(grid, padded, text + references if references else 0)


def layout_of(model: Any) -> tuple[Transformer | None, Layers]:
    """Return the layout of ComfyUI's `diffusion_model` and its self-attentions over the image.

    The layout is None for a UNet.

    Raises:
        ValueError: it is neither a UNet nor a transformer that merges.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's
    bases = [base.__name__ for base in type(model).__mro__]
    if UNET in bases:
        return None, layers_of_unet(model)
    base = next((base for base in bases if base in FAMILIES or base in COMFYUI), "")
    family = FAMILIES.get(base)
    if family is None:
        name, why = COMFYUI.get(base, (known_as(bases[0]), UNKNOWN_PLACE))
        raise ValueError(
            f"MaMe token merging: {name} does not merge, since {why}; remove the node from this"
            " model's path"
        )
    if any(
        getattr(block, "flipped_img_txt", False) for block in getattr(model, "double_blocks", ())
    ):
        raise ValueError(
            f"MaMe token merging: expected {family.name} with its text before its image, got the"
            " older order; update ComfyUI, or remove the node from this model's path"
        )
    patch: tuple[int, ...] = ()
    for path in family.patch.split():
        size: Any = model
        for name in path.split("."):
            size = getattr(size, name)
        patch += tuple(size) if isinstance(size, (tuple, list)) else (size or 1,)
    transformer = Transformer(
        family,
        patch * 2 if len(patch) == 1 else patch,
        getattr(model, "pad_tokens_multiple", None) or 1,
        getattr(model, "ref_conv", None) is not None or "SCAILWanModel" in bases,
        getattr(model, "default_ref_method", "") if "SingleStreamDiT" in bases else "",
        getattr(model, "siglip_embedder", None) is not None,
    )
    return transformer, layers_of_transformer(model)
