"""Answers of a model that gives features alone: the nearest image of a gallery, or its class.

Half of the images are the gallery, and the other half is asked. Features of the gallery are the
unmerged model's: merging is to find what is stored. It is the nearest-neighbour classification by
which papers compare features without a classifier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mame_sd.errors import UserError
from mame_sd.perception.known_encoders import find_encoder
from mame_sd.runs.devices import pick_device, pick_dtype
from mame_sd.runs.model_files import ModelChoice

from ..networks.pretrained import DEVIATION, MEAN, SALIENCY, load_dinov2
from ..weights.registry import REGISTRY
from .answers import inputs_of
from .data import ImageSet
from .encoders import LoadedEncoder
from .heads import Head
from .methods import Method
from .rivals import embedding_of, grown


def load_saliency(choice: ModelChoice, local_rank: int = 0) -> LoadedEncoder:
    """The DINOv2-S of `load_dinov2`, whose weights are fetched.

    Raises as `load_encoder`, and as `load_dinov2`.
    """
    from transformers import BitImageProcessor

    device = pick_device(choice.device, local_rank)
    dtype = pick_dtype(choice.dtype, device)
    model = load_dinov2(offline=choice.offline).requires_grad_(False)
    processor = BitImageProcessor(
        size={"shortest_edge": 224},
        crop_size={"height": 224, "width": 224},
        image_mean=list(MEAN),
        image_std=list(DEVIATION),
    )
    identity = {
        "name": SALIENCY,
        "class": type(model).__name__,
        "sha256": REGISTRY[SALIENCY].sources[0].sha256,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
    }
    return LoadedEncoder(
        model=model.to(device, dtype), processor=processor, tokenizer=None, identity=identity
    )


@dataclass(frozen=True)
class NearestHead(Head):
    """Logits are cosines to the nearest image of the gallery of each answer.

    Attributes:
        gallery: unit vectors [N, d].
        answers: the answer that each of them stands for [N].
    """

    gallery: Tensor | None = None
    answers: Tensor | None = None

    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """See `Head`; an answer without an image in the gallery is never given."""
        assert self.gallery is not None
        assert self.answers is not None
        cosines = summary(self.encoder.model, inputs) @ self.gallery.T
        found = cosines.new_full((len(cosines), int(self.answers.max()) + 1), -2.0)
        return found.scatter_reduce(1, self.answers.expand_as(cosines), cosines, "amax")

    @torch.no_grad()
    def nearness(self, method: Method, inputs: Mapping[str, Tensor]) -> dict[str, list[float]]:
        """Cosines to the unmerged model's class token, and the mean of those to its patches, to
        whose places merged ones are restored.
        """
        model = self.encoder.model
        encoder, _, known = find_encoder(model)
        prefix = known.prefix_tokens_of(encoder)
        whole = model(**inputs).last_hidden_state.float()
        with method.counted(model) as handle:
            handle.capture()
            own = model(**inputs).last_hidden_state
            own = (handle.restore(own) if handle.plans() else own).float()
        if own.shape[1] != whole.shape[1]:  # of smaller images
            patch = embedding_of(encoder).kernel_size[-1]
            height, width = (side // patch for side in inputs["pixel_values"].shape[-2:])
            own = grown(own, prefix, (height, width))
        cosines = F.cosine_similarity(own, whole, dim=-1)  # [B, L]
        first = cosines[:, 0] if prefix else cosines.mean(1)
        return {"class_token": first.tolist(), "patches": cosines[:, prefix:].mean(1).tolist()}


def summary(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Unit vectors [B, d] that stand for whole images: the class token, else what the model pools,
    else the mean over tokens.

    Raises UserError for a model that gives no tokens.
    """
    output = model(**inputs)
    tokens = getattr(output, "last_hidden_state", None)
    if tokens is None:
        raise UserError(
            "--model: expected a model with a classifier, a text half or tokens, got"
            f" {type(model).__name__}; give one of these"
        )
    encoder, _, known = find_encoder(model)
    pooled = getattr(output, "pooler_output", None)
    if known.prefix_tokens_of(encoder):
        pooled = tokens[:, 0]
    return F.normalize((tokens.mean(1) if pooled is None else pooled).float(), dim=-1)


@torch.no_grad()
def nearest_head(
    encoder: LoadedEncoder,
    images: ImageSet,
    size: int,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> tuple[Head, ImageSet, dict[str, Any]]:
    """The head, the half of the images that it is asked, and JSON values that say how it answers.

    Args:
        encoder: the model.
        images: in the order in which batches take them; the first half is the gallery.
        size: of a batch.
        on_progress: called with how many images of the gallery are done, and with their number.

    Raises:
        UserError: fewer than two images, or one that can't be read.
    """
    middle = len(images.files) // 2
    if not middle:
        raise UserError(
            f"--data {images.folder}: expected 2 images or more for a model that gives features"
            f" alone, got {len(images.files)}; add some"
        )
    first, second = (
        replace(
            images,
            files=images.files[part],
            labels=None if images.labels is None else images.labels[part],
        )
        for part in (slice(middle), slice(middle, None))
    )
    head, rows = Head(encoder), []
    for places in first.batches(size):
        rows.append(summary(encoder.model, inputs_of(head, first, places)))
        on_progress(places.stop, middle)
    answers = range(middle) if first.labels is None else first.labels
    numbers = torch.tensor([*answers], device=encoder.device)
    about = {"head": "the nearest image of a gallery", "gallery": first.about()}
    return NearestHead(encoder, None, torch.cat(rows), numbers), second, about
