"""What the models that are known make of an image: features of patches, and their places in a
prompt. Patches merge behind the tower, or in its blocks.

LLaVA gives each patch of its tower. LLaVA-NeXT gives those of a small image and of its tiles, row
by row, without the tiles' padding, with a token after each row. Qwen-VL gives what its tower folds
of 2 x 2 patches, with three positions each.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from mame_sd.captions.farthest import merged
from mame_sd.captions.prompts import Image
from mame_sd.perception.handle import EncoderHandle

LLAVA = ("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration")
QWEN = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
KNOWN = (*LLAVA, *QWEN)
_TOWER = ("model.vision_tower", "model.multi_modal_projector")
PARTS = {  # what merging calls and reads of each
    LLAVA[0]: _TOWER,
    LLAVA[1]: (*_TOWER, "model.image_newline"),
    **dict.fromkeys(QWEN, ("model.get_image_features", "model.get_rope_index")),
}
LINE = -1  # where a token for a new line stands
_TURNED = "positions turn the queries and keys of its tower, and a merged token has none of its own"
REFUSED = {
    "Qwen3VLForConditionalGeneration": (
        "first layers of its language model add what its tower saw to each image token"
    ),
    "Blip2ForConditionalGeneration": "its language model reads a fixed number of queries already",
    "InstructBlipForConditionalGeneration": (
        "its language model reads a fixed number of queries already"
    ),
    "LlavaOnevisionForConditionalGeneration": "it resizes its grid of patches, which merging ends",
    "VideoLlavaForConditionalGeneration": "two towers feed it",
    "PaliGemmaForConditionalGeneration": (
        "a mask lets its image tokens see one another, and is made for their whole number"
    ),
    "Idefics3ForConditionalGeneration": "it folds neighbouring patches into one, by their places",
    "SmolVLMForConditionalGeneration": "it folds neighbouring patches into one, by their places",
}


def name_of(target: Any) -> str | None:
    """The class of `target` that is known or refused; None where there is none."""
    if not isinstance(target, nn.Module):
        return None
    names = (kind.__name__ for kind in type(target).__mro__)
    return next((name for name in names if name in KNOWN or name in REFUSED), None)


def is_captioner(target: Any) -> bool:
    """Whether `target` holds a model that reads images for a language model: one that is known, or
    known to be refused.
    """
    return isinstance(target, nn.Module) and any(map(name_of, target.modules()))


def reader_in(target: Any) -> nn.Module | None:
    """The outermost model in `target` whose prompts have a token for images, known or not."""
    names = ("image_token_id", "image_token_index")
    modules = target.modules() if isinstance(target, nn.Module) else ()
    for module in modules:
        config = getattr(module, "config", None)
        if any(isinstance(getattr(config, name, None), int) for name in names):
            return module
    return None


def layer_of(model: Any) -> int:
    """The tower's hidden state that the language model reads: how many blocks come before it.

    Raises:
        ValueError: it reads several, which merging leaves with unequal numbers of tokens, or no
            block of its tower can merge.
    """
    if name_of(model) in QWEN:
        raise ValueError(
            f"blocks: expected tokens of {name_of(model)} to merge behind its tower, got blocks:"
            f" {_TURNED}; leave them out"
        )
    layer = model.config.vision_feature_layer
    if not isinstance(layer, int):
        raise ValueError(
            f"vision_feature_layer: expected one layer, got {layer!r}: layers before and after"
            " merging have unequal numbers of tokens"
        )
    depth = int(model.config.vision_config.num_hidden_layers)
    return layer if layer >= 0 else depth + 1 + layer


def images_behind(
    model: Any, inputs: dict[str, Any], keep: float | None, tau: float | None
) -> list[Image]:
    """What the images of a call give whose patches merge behind the tower.

    Args:
        model: of a known class.
        inputs: as `images_of`.
        keep: share of an image's tokens that stays; a NeXT's tokens for new lines all do.
        tau: similarity above which a token merges, where `keep` is None.
    """
    if name_of(model) in QWEN:
        seen = model.model.get_image_features(
            inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True
        ).pooler_output
        return [Image(*merged(one[None], None, keep, tau)[0], len(one)) for one in seen]
    single = name_of(model) == "LlavaForConditionalGeneration"
    tiles = [inputs["pixel_values"]] if single else _tiles(model, inputs)
    output = model.model.vision_tower(torch.cat(tiles), output_hidden_states=True, return_dict=True)
    states = output.hidden_states[layer_of(model)][:, _skipped(model) :]
    features = model.model.multi_modal_projector(states)
    numbers = torch.arange(states[..., 0].numel(), device=states.device).view(states.shape[:2])
    if single:
        spots = list(numbers)  # of each image the tokens that it gives
    else:
        prefix = states.shape[1] - _patches(inputs["pixel_values"], model)
        line, every = numbers.new_tensor([LINE]), torch.arange(states.shape[1])
        spots = []
        for own, size in zip(numbers.split([*map(len, tiles)]), inputs["image_sizes"], strict=True):
            seen = [(one[:, None], every.to(one.device)) for one in own]
            spots.append(_packed(model, seen, size, prefix, line).features[:, 0])
    flat, like = features.flatten(0, 1), states.flatten(0, 1)
    images: dict[int, Image] = {}
    for some in _alike([int((own != LINE).sum()) for own in spots]):
        free = torch.stack([spots[n][spots[n] != LINE] for n in some])  # [B, L]
        for n, (own, stay) in zip(some, merged(flat[free], like[free], keep, tau), strict=True):
            images[n] = _with_lines(model, spots[n], own, stay)
    return [images[n] for n in range(len(spots))]


def axes_of(model: Any, ids: Tensor, call: dict[str, Any]) -> Tensor | None:
    """Positions [3, B, L] by time, row and column of prompts ids [B, L]; None: they have one axis.

    Raises:
        ValueError: the model needs to be told which tokens are of images, and is not.
    """
    index = getattr(model.model, "get_rope_index", None)
    if index is None:
        return None
    names = inspect.signature(index).parameters
    if "mm_token_type_ids" in names and "mm_token_type_ids" not in call:
        raise ValueError(
            "mm_token_type_ids: expected the processor's beside images, got none; without them"
            f" {type(model).__name__} can't tell rows and columns"
        )
    found: Tensor = index(ids, **{name: call[name] for name in names if name in call})[0]
    return found


def _alike(counts: list[int]) -> list[list[int]]:
    """Which images have as many tokens as one another."""
    return [[n for n, own in enumerate(counts) if own == count] for count in {*counts}]


def _with_lines(model: Any, spots: Tensor, own: Tensor, stay: Tensor) -> Image:
    """An image of which tokens `own` [k, C] stay, with the model's tokens for new lines.

    Args:
        spots: of each of the image's tokens [L], LINE at new lines.
        own: features.
        stay: their places [k] among those that are no new lines.
    """
    lines = (spots == LINE).nonzero()[:, 0]
    if not len(lines):
        return Image(own, stay, len(spots))
    places = torch.cat([(spots != LINE).nonzero()[:, 0][stay], lines])
    order = places.argsort()
    new = model.model.image_newline[None].expand(len(lines), -1).to(own)
    return Image(torch.cat([own, new])[order], places[order], len(spots))


def images_of(model: Any, tower: EncoderHandle, inputs: dict[str, Any], one: bool) -> list[Image]:
    """What the images of a call give whose patches merge in the tower's blocks.

    Args:
        model: of a known class.
        tower: merging on its vision tower.
        inputs: `pixel_values`, and `image_sizes` where the model has tiles.
        one: images go through the tower one by one, so that each keeps its own number of tokens.
    """
    pixels = inputs["pixel_values"]
    if name_of(model) == "LlavaForConditionalGeneration":
        found = _seen(model, tower, pixels, one)
        unmerged = _patches(pixels, model) + tower.num_prefix_tokens - _skipped(model)
        return [Image(features, places, unmerged) for features, places in found]
    tiles = _tiles(model, inputs)
    found = _seen(model, tower, torch.cat(tiles), one)
    images = []
    for tile, size in zip(tiles, inputs["image_sizes"], strict=True):
        own, found = found[: len(tile)], found[len(tile) :]
        prefix = tower.num_prefix_tokens - _skipped(model)
        images.append(_packed(model, own, size, prefix, model.model.image_newline))
    return images


def _skipped(model: Any) -> int:
    """How many of the tower's first tokens the language model does not see."""
    return int(model.config.vision_feature_select_strategy == "default")


def _patches(pixels: Tensor, model: Any) -> int:
    side = int(model.config.vision_config.patch_size)
    return (pixels.shape[-2] // side) * (pixels.shape[-1] // side)


def _seen(
    model: Any, tower: EncoderHandle, pixels: Tensor, one: bool
) -> list[tuple[Tensor, Tensor]]:
    """Projected features [k, C] and places [k] among the tokens that the language model would see.
    They are of each image of pixels [N, 3, h, w], in the order of the places.
    """
    skip, count = _skipped(model), layer_of(model)
    found: list[tuple[Tensor, Tensor]] = []
    unmerged = _patches(pixels, model) + tower.num_prefix_tokens - skip
    for some in pixels.split(1) if one and tower.active else (pixels,):
        output = model.model.vision_tower(some, output_hidden_states=True, return_dict=True)
        states = output.hidden_states[count]
        places = tower.kept(count, len(some), states.shape[1], states.device)
        order = places.argsort(1)
        states = states.gather(1, order.unsqueeze(-1).expand_as(states))[:, skip:]
        found.extend(
            zip(
                model.model.multi_modal_projector(states),
                places.gather(1, order)[:, skip:] - skip,
                strict=True,
            )
        )
    if tower.active and all(len(places) == unmerged for _, places in found):
        tower.active = False  # to the bit as without merging, which puts destinations first
        try:
            return _seen(model, tower, pixels, one)
        finally:
            tower.active = True
    return found


def _tiles(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """The tiles of each image [n, 3, h, w], the small image first."""
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
        return [own[:count] for own, count in zip(pixels, counts, strict=True)]
    return list(pixels.split(counts))


def _packed(
    model: Any, tiles: list[tuple[Tensor, Tensor]], size: Tensor, prefix: int, newline: Tensor
) -> Image:
    """The image of which tiles were seen, as LLaVA-NeXT packs it. The small image comes first, then
    rows of all tiles together without padding, each with the model's token for a new line.

    Args:
        model: a LLaVA-NeXT.
        tiles: of each its features [k, C] and their places; the small image first.
        size: (height, width) of the image in pixels.
        prefix: how many tokens that are no patches the language model sees of each tile.
        newline: the model's token for a new line [C].
    """
    from transformers.models.llava_next.modeling_llava_next import (
        get_anyres_image_grid_shape,
        unpad_image,
    )

    config = model.config
    side = config.vision_config.image_size // config.vision_config.patch_size
    small = side * side + prefix
    base, places = tiles[0]
    if len(tiles) == 1:
        after = torch.cat([places, places.new_tensor([small])])
        return Image(torch.cat([base, newline[None].to(base)]), after, small + 1)
    down, across = get_anyres_image_grid_shape(
        size, config.image_grid_pinpoints, config.vision_config.image_size
    )
    shape = (down, across, side, side)
    numbers = torch.arange(down * across * side * side, device=base.device).view(shape)
    plane = numbers.permute(0, 2, 1, 3).flatten(2, 3).flatten(0, 1)[None]
    plane = unpad_image(plane, size)[0]  # [rows, columns] tokens of the tiles, in this order
    rows, columns = plane.shape
    packed = torch.full((numbers.numel(),), -1, device=base.device)
    spots = torch.arange(rows * (columns + 1), device=base.device).view(rows, columns + 1)
    packed[plane.flatten()] = spots[:, :columns].flatten()
    spot, seen = [], []
    for number, (features, own) in enumerate(tiles[1:]):
        patch = own >= prefix
        where = packed[own[patch] - prefix + number * side * side]
        spot.append(where[where >= 0])
        seen.append(features[patch][where >= 0])
    lines = newline[None].expand(rows, -1).to(base)
    spot.append(spots[:, columns])
    order = torch.cat(spot).argsort()
    return Image(
        torch.cat([base, torch.cat([*seen, lines])[order]]),
        torch.cat([places, torch.cat(spot)[order] + small]),
        small + rows * (columns + 1),
    )
