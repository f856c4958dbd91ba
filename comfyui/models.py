"""Which models the node merges, and where the image's tokens are in a transformer's attention.

All hand q, k and v, after rotation, to `optimized_attention_override`. UNets alone have one
`attn1_patch` before their projections, where whole tokens merge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mame_sd.diffusion.families.refused import known_as

from .layers import Layers, layers_of_transformer, layers_of_unet

UNET = "UNetModel"
HIDDEN = "ComfyUI hands its attention to no node"
UNKNOWN = "the node does not know yet where its image is"
CAUSAL = "each of its frames attends to those before it, from a cache of keys"


@dataclass(frozen=True)
class Family:
    """How a transformer lays out the sequence [..., L, ...] of its self-attention.

    Attributes:
        name: what people call it.
        patch: the attributes that hold its patch size, one for all sides or one for each; empty:
            each of the latent's pixels is a token.
        image: the image comes "last", behind any number of other tokens; "first", before them; or
            "alone", which other sequences are not.
        references: where tokens of reference images are: "behind" the image, "before" it among the
            others, or nowhere.
        masked: calls with an attention mask merge; else their image starts elsewhere in each
            sample.
        hidden: the blocks and their attention, where the engine hands it to no node (`handed.py`).
        unnamed: the engine does not say which of its blocks attends, but lets each be replaced.
    """

    name: str
    patch: str = "patch_size"
    image: Literal["last", "first", "alone"] = "last"
    references: Literal["", "behind", "before"] = ""
    masked: bool = True
    hidden: tuple[str, str] = ("", "")
    unnamed: bool = False


COSMOS = "patch_temporal patch_spatial patch_spatial"
# By the class of ComfyUI's diffusion_model, or of its nearest base. A text: why it can't merge,
# after the name that people know it by.
FAMILIES: dict[str, Family | tuple[str, str]] = {
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
    "ErnieImageModel": Family("ERNIE-Image", image="first", hidden=("layers", "self_attention")),
    # Text, references and sound before the video. Those with keyframes have them there too.
    "MiniMaxH3Model": Family("MiniMax H3"),
    "CausalWanModel": ("Wan CausVid and Self-Forcing", CAUSAL),
    "WanAnimate2Model": ("Wan Animate 2", "its attention goes by windows of frames"),
    "PixArtMS": ("PixArt", HIDDEN),
    "HunYuanDiT": ("HunyuanDiT", HIDDEN),
    "StageC": ("Stable Cascade", UNKNOWN),
    "StageB": ("Stable Cascade", UNKNOWN),
    "PixDiT_T2I": ("PixelDiT", UNKNOWN),
    "HiDreamO1Transformer": ("HiDream O1", "its prompt takes a pass of its own"),
}


@dataclass(frozen=True)
class Place:
    """Where the image is in the sequences of one call of the model.

    Attributes:
        grid: (frames, rows, columns) of its tokens.
        padded: how many tokens it is padded to.
        least, most: tokens beside it, in a sequence that holds all.
        before: where it begins; None: at the end, but for the tokens `behind` it.
    """

    grid: tuple[int, int, int]
    padded: int
    least: float
    most: float = math.inf
    before: int | None = None
    behind: int = 0

    def start(self, length: int) -> int | None:
        """Where the image begins in a sequence of `length`; None when it is not in it."""
        others = length - self.padded
        if not self.least <= others <= self.most:
            return None
        return others - self.behind if self.before is None else self.before


@dataclass(frozen=True)
class Transformer:
    """A model of a family.

    Attributes:
        family: how its sequence is laid out.
        patch: size of a patch along the latent's last dimensions.
        multiple: each image and prompt is padded at its end to a multiple of this many tokens.
        reference_frame: it puts the tokens of `reference_latent` before the video.
        reference_method: what it does with reference images where the call does not say; None: it
            leaves them out.
        sees: of Z-Image Omni, whether it has what SigLIP sees of the references.
        hidden: attention that the engine hands to no node, by its path in the model.
    """

    family: Family
    patch: tuple[int, ...]
    multiple: int
    reference_frame: bool = False
    reference_method: Any = ""
    sees: bool = False
    hidden: Mapping[str, Any] = field(default_factory=dict)

    def grid(self, latent: Sequence[int]) -> tuple[int, int, int]:
        """(frames, rows, columns) of tokens of a latent of shape [B, C, ..., H, W]."""
        sizes = latent[2:]
        patch = ((1,) * len(sizes) + self.patch)[-len(sizes) :]
        counts = tuple(math.ceil(size / side) for size, side in zip(sizes, patch, strict=True))
        t, h, w = (1,) * (3 - len(counts)) + counts
        return t, h, w

    def padded(self, tokens: int) -> int:
        return math.ceil(tokens / self.multiple) * self.multiple

    def tokens(self, latents: Sequence[Any]) -> int:
        """Of images with these latents, each padded."""
        return sum(self.padded(math.prod(self.grid(latent.shape))) for latent in latents)

    def text(self, prompt: Any, given: Mapping[str, Any]) -> int:
        """Tokens of the prompts of a call, each padded.

        Args:
            prompt: the first.
            given: the other arguments of the call, by name.
        """
        parts = [part for part in (prompt, given.get("direct_context")) if part is not None]
        counts = [sum(part.shape[1] for part in parts)]
        counts += [1 if part is None else part.shape[1] for part in given.get("ref_contexts") or ()]
        return sum(map(self.padded, counts))

    def seen(self, given: Mapping[str, Any]) -> int:
        """Of Z-Image Omni, tokens of what SigLIP sees of each reference, and of the image itself,
        of which it sees nothing. Each is padded, and nothing is as long as one pad.
        """
        references = given.get("ref_latents") or ()
        features = [*(given.get("siglip_feats") or ()), *[None] * len(references)]
        sizes = [1 if one is None else one.shape[1] * one.shape[2] for one in features]
        return sum(map(self.padded, (*sizes[: len(references)], 1))) if self.sees else 0

    def place(self, latent: Sequence[int], given: Mapping[str, Any], text: int) -> Place:
        """Where the image is.

        Args:
            latent: shape of the model's latents.
            given: the other arguments of the call, by name.
            text: tokens of the prompts, each padded.
        """
        if given.get("latent_shapes"):  # LTX-2: video and sound in one latent
            latent = given["latent_shapes"][0]
        if given.get("image_cond") is not None and self.family.name == "HiDream":
            latent = (*latent[:-1], latent[-1] + given["image_cond"].shape[-1])
        grid = self.grid(latent)
        padded, family = self.padded(math.prod(grid)), self.family
        references = 0
        if family.references and given.get("ref_latents_method", self.reference_method) is not None:
            references = self.tokens(given.get("ref_latents") or ())
        if family.image == "alone":
            return Place(grid, padded, 0, 0)
        if family.image == "first":
            frame = given.get("reference_latent") if self.reference_frame else None
            before = 0 if frame is None else self.tokens([frame])
            return Place(grid, padded, before, before=before)
        if family.references == "behind":
            return Place(grid, padded, references, behind=references)
        if given.get("ref_frames"):  # Ming-Image: references in one sequence with its frames
            return Place(grid, padded, math.inf)
        if self.multiple > 1 and references:
            beside = text + references + self.seen(given)
            return Place(grid, padded, beside, beside)
        return Place(grid, padded, text + references if references else 0)


def layout_of(model: Any) -> tuple[Transformer | None, Layers]:
    """How ComfyUI's `diffusion_model` lays out its image (None: it is a UNet), and its
    self-attentions over it.

    Raises:
        ValueError: it is neither a UNet nor a transformer that merges.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's
    bases = [base.__name__ for base in type(model).__mro__]
    if UNET in bases:
        return None, layers_of_unet(model)
    family = next((FAMILIES[base] for base in bases if base in FAMILIES), None)
    if not isinstance(family, Family):
        name, why = family or (known_as(bases[0]), UNKNOWN)
        raise ValueError(
            f"MaMe token merging: {name} does not merge, since {why}; take the node out of this"
            " model's path"
        )
    if any(
        getattr(block, "flipped_img_txt", False) for block in getattr(model, "double_blocks", ())
    ):
        raise ValueError(
            f"MaMe token merging: expected {family.name} with its text before its image, got the"
            " older order; update ComfyUI, or take the node out of this model's path"
        )
    patch: tuple[int, ...] = ()
    for path in family.patch.split():
        size: Any = model
        for name in path.split("."):
            size = getattr(size, name)
        patch += tuple(size) if isinstance(size, (tuple, list)) else (size or 1,)
    blocks, name = family.hidden
    found = Transformer(
        family,
        patch * 2 if len(patch) == 1 else patch,
        getattr(model, "pad_tokens_multiple", None) or 1,
        getattr(model, "ref_conv", None) is not None or "SCAILWanModel" in bases,
        getattr(model, "default_ref_method", "") if "SingleStreamDiT" in bases else "",
        getattr(model, "siglip_embedder", None) is not None,
        {
            f"{blocks}.{i}.{name}": getattr(b, name)
            for i, b in enumerate(getattr(model, blocks, ()))
        },
    )
    return found, layers_of_transformer(model)
