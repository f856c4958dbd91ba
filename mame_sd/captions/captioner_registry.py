"""List the captioners that merge: an image's features in each, and their places in a prompt.

LLaVA returns one feature for each patch of its tower. LLaVA-NeXT returns those of a small image and
of its tiles, row by row, without the tiles' padding, and adds a token after each row. Qwen-VL
returns one feature for 2 x 2 patches, with three positions each.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.captions.farthest import merged
from mame_sd.captions.prompts import Image
from mame_sd.refused import CAPTIONERS

LLAVA = ("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration")
QWEN = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
KNOWN = (*LLAVA, *QWEN)
_TOWER = ("model.vision_tower", "model.multi_modal_projector")
PARTS = {  # the parts of each model that merging calls or reads
    LLAVA[0]: _TOWER,
    LLAVA[1]: (*_TOWER, "model.image_newline", "model.pack_image_features"),
    **dict.fromkeys(QWEN, ("model.get_image_features", "model.get_rope_index")),
}
LINE = -1  # index of a token for a new line


def name_of(target: Any) -> str | None:
    """Return the class name of `target` if it is registered or refused; None otherwise."""
    if not isinstance(target, nn.Module):
        return None
    names = (kind.__name__ for kind in type(target).__mro__)
    return next((name for name in names if name in KNOWN or name in CAPTIONERS), None)


def is_captioner(target: Any) -> bool:
    """Return True if `target` contains a registered or refused captioner."""
    return isinstance(target, nn.Module) and any(map(name_of, target.modules()))


def reader_in(target: Any) -> nn.Module | None:
    """Return the outermost model in `target` whose prompts have a token for images, or None."""
    names = ("image_token_id", "image_token_index")
    modules = target.modules() if isinstance(target, nn.Module) else ()
    for module in modules:
        config = getattr(module, "config", None)
        if any(isinstance(getattr(config, name, None), int) for name in names):
            return module
    return None


def layer_of(model: Any) -> int:
    """Return the number of tower blocks before the hidden state that the language model reads.

    Raises:
        ValueError: it reads several hidden states.
    """
    layer = model.config.vision_feature_layer
    if not isinstance(layer, int):
        raise ValueError(
            f"vision_feature_layer: expected one layer, got {layer!r}, whose features are wider"
            " than the tokens that are compared"
        )
    depth = int(model.config.vision_config.num_hidden_layers)
    return layer if layer >= 0 else depth + 1 + layer


def images_of(model: Any, inputs: dict[str, Any], keep: float) -> list[Image]:
    """Merge the tokens of a call's images after the tower.

    Args:
        model: a model of a registered class.
        inputs: `pixel_values`; for Qwen-VL also `image_grid_thw`, for LLaVA-NeXT `image_sizes`.
        keep: share of an image's tokens that stays. LLaVA-NeXT's tokens for new lines all stay.

    Returns:
        One `Image` per image of the call.
    """
    if name_of(model) in QWEN:
        seen = model.model.get_image_features(
            inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True
        ).pooler_output
        alone = [(merged(features[None], None, keep), len(features)) for features in seen]
        return [Image(kept[0], stay[0], length) for (kept, stay), length in alone]
    single = name_of(model) == LLAVA[0]
    tiles = [inputs["pixel_values"]] if single else _tiles(model, inputs)
    output = model.model.vision_tower(torch.cat(tiles), output_hidden_states=True, return_dict=True)
    skip = int(model.config.vision_feature_select_strategy == "default")
    states = output.hidden_states[layer_of(model)][:, skip:]
    features = model.model.multi_modal_projector(states)
    numbers = torch.arange(states[..., 0].numel(), device=states.device).view(states.shape[:2])
    spots = list(numbers)  # by image: the indices of its features
    if not single:  # the model lays out the indices as it would lay out the features
        indices = numbers.unsqueeze(-1).double().split([*map(len, tiles)])
        strategy, line = model.config.vision_feature_select_strategy, indices[0].new_tensor([LINE])
        laid = model.model.pack_image_features(indices, inputs["image_sizes"], strategy, line)[0]
        spots = [one.flatten().long() for one in laid]
    flat, like = features.flatten(0, 1), states.flatten(0, 1)
    images: dict[int, Image] = {}
    for some in _alike([int((spot != LINE).sum()) for spot in spots]):
        free = torch.stack([spots[n][spots[n] != LINE] for n in some])  # [B, L]
        joined = merged(flat[free], like[free], keep)
        for n, kept, stay in zip(some, *joined, strict=True):
            images[n] = _with_lines(model, spots[n], kept, stay)
    return [images[n] for n in range(len(spots))]


def axes_of(model: Any, call: dict[str, Any]) -> Tensor | None:
    """Return the positions of a call's prompts.

    Returns:
        The call's own positions, or [3, B, L] by time, row and column. None if the model has one
        axis and the call has no positions.

    Raises:
        ValueError: the model needs to be told which tokens are image tokens, and isn't.
    """
    positions: Tensor | None = call.get("position_ids")
    index = getattr(model.model, "get_rope_index", None)
    if index is None:
        return positions
    names = inspect.signature(index).parameters
    if "mm_token_type_ids" in names and "mm_token_type_ids" not in call:
        raise ValueError(
            "mm_token_type_ids: expected the processor's with images, got none; without them"
            f" {type(model).__name__} can't tell rows and columns"
        )
    if positions is None:
        positions = index(**{name: call[name] for name in names if name in call})[0]
    return positions


def _alike(counts: list[int]) -> list[list[int]]:
    """Group the images that have equal numbers of tokens."""
    return [[n for n, other in enumerate(counts) if other == count] for count in {*counts}]


def _with_lines(model: Any, spots: Tensor, features: Tensor, stay: Tensor) -> Image:
    """Insert the model's tokens for new lines among the features of an image that stay.

    Args:
        model: a LLaVA-NeXT.
        spots: for each of the image's tokens [L], its feature's index, or LINE for a new line.
        features: features that stay, [k, C].
        stay: their places [k] among the tokens that aren't new lines.
    """
    from accelerate.utils import align_module_device

    lines = (spots == LINE).nonzero()[:, 0]
    if not len(lines):
        return Image(features, stay, len(spots))
    places = torch.cat([(spots != LINE).nonzero()[:, 0][stay], lines])
    order = places.argsort()
    with align_module_device(model.model):  # it may be offloaded
        new = model.model.image_newline[None].expand(len(lines), -1).to(features)
    return Image(torch.cat([features, new])[order], places[order], len(spots))


def _tiles(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """Split a call's pixels into the tiles of each image, [n, 3, h, w], the small image first."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    config, pixels = model.config, inputs["pixel_values"]
    counts = [
        image_size_to_num_patches(
            image_size=size,
            grid_pinpoints=config.image_grid_pinpoints,
            patch_size=config.vision_config.image_size,
        )
        for size in inputs["image_sizes"]
    ]
    if pixels.dim() == 5:
        return [tiles[:count] for tiles, count in zip(pixels, counts, strict=True)]
    return list(pixels.split(counts))
