"""List the captioners that merge: an image's features in each, and their places in a prompt.

LLaVA returns one feature for each patch of its tower, Qwen-VL one for 2 x 2 patches, with three
positions each.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from mame_sd.captions.farthest import merged
from mame_sd.captions.prompts import Image
from mame_sd.refused import CAPTIONERS

LLAVA = ("LlavaForConditionalGeneration",)
QWEN = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
KNOWN = (*LLAVA, *QWEN)
PARTS = {  # the parts of each model that merging calls or reads
    LLAVA[0]: ("model.vision_tower", "model.multi_modal_projector"),
    **dict.fromkeys(QWEN, ("model.get_image_features", "model.get_rope_index")),
}


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

    Raise ValueError if it reads several.
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
        inputs: `pixel_values`; for Qwen-VL also `image_grid_thw`.
        keep: share of an image's tokens that stays.

    Returns:
        One `Image` per image of the call.
    """
    if name_of(model) in QWEN:
        seen = model.model.get_image_features(
            inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True
        ).pooler_output
        alone = [(merged(features[None], None, keep), len(features)) for features in seen]
        return [Image(kept[0], stay[0], length) for (kept, stay), length in alone]
    pixels = inputs["pixel_values"]
    output = model.model.vision_tower(pixels, output_hidden_states=True, return_dict=True)
    skip = int(model.config.vision_feature_select_strategy == "default")
    states = output.hidden_states[layer_of(model)][:, skip:]
    joined = merged(model.model.multi_modal_projector(states), states, keep)
    return [Image(kept, stay, states.shape[1]) for kept, stay in zip(*joined, strict=True)]


def axes_of(model: Any, call: dict[str, Any]) -> Tensor | None:
    """Return the positions of a call's prompts: its own, or [3, B, L] by time, row and column.

    If the model has one axis and the call has no positions, return None.
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
