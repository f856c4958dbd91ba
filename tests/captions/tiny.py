"""Tiny LLaVA and Qwen-VL models with random weights, their prompts, and loops that merge."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipVisionConfig,
)

from mame_sd.compat import CACHE_NAMES

SIDE, PATCH, WIDTH = 24, 4, 32
GRID = SIDE // PATCH
PATCHES = GRID**2
IMAGES = [[PATCHES, PATCHES], [PATCHES]]  # of two prompts, so that these are of unequal lengths
IMAGE, PAD, VIDEO, START = 50, 1, 51, 52
GRIDS = [[(1, 4, 8), (1, 8, 4)], [(1, 6, 6)]]  # of Qwen-VL's prompts: patches of each image
_TAKEN = inspect.signature(LlavaForConditionalGeneration.forward).parameters
CACHE = next(name for name in CACHE_NAMES if name in _TAKEN)  # as this transformers calls it
_BLOCKS: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_attention_heads": 2,
    "intermediate_size": 2 * WIDTH,
    "initializer_range": 0.2,
}
_VISION = {**_BLOCKS, "num_hidden_layers": 5, "image_size": SIDE, "patch_size": PATCH}
CLIP, SIGLIP = CLIPVisionConfig(**_VISION), SiglipVisionConfig(**_VISION)
TEXT = LlamaConfig(vocab_size=60, num_hidden_layers=2, pad_token_id=PAD, eos_token_id=59, **_BLOCKS)


def llava(tower: Any = CLIP, text_layers: int = 2, **more: Any) -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    text = LlamaConfig(**{**TEXT.to_dict(), "num_hidden_layers": text_layers})
    config = LlavaConfig(vision_config=tower, text_config=text, image_token_id=IMAGE, **more)
    model = LlavaForConditionalGeneration(config).eval()
    model.lm_head.weight.data[IMAGE] = 0  # it writes no image tokens
    return model


def qwen(older: bool = False) -> Any:
    """Patches are folded by 2 x 2, and windows are as wide as two folded ones."""
    torch.manual_seed(0)
    text = {
        "vocab_size": 60,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
        "initializer_range": 0.2,
        "pad_token_id": PAD,
        "eos_token_id": 59,
    }
    vision = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": PATCH,
        "initializer_range": 0.2,
        "hidden_size": WIDTH,
    }
    if older:
        vision["embed_dim"] = WIDTH
    else:
        vision.update(out_hidden_size=WIDTH, window_size=16, fullatt_block_indexes=[1])
        vision["intermediate_size"] = 2 * WIDTH
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    kind = Qwen2VLForConditionalGeneration if older else Qwen2_5_VLForConditionalGeneration
    config = Qwen2VLConfig if older else Qwen2_5_VLConfig
    model = kind(config(text_config=text, vision_config=vision, **ids)).eval()
    model.lm_head.weight.data[IMAGE] = 0  # it writes no image tokens
    return model


def prompts(rows: list[list[int]], right: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Return ids and mask of prompts with images of these lengths between words, padded."""
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> list[int]:
        return torch.randint(3, 49, (count,), generator=generator).tolist()

    ids = []
    for row in rows:
        one = words(3)
        for length in row:
            one += [IMAGE] * length + words(2)
        ids.append(one)
    longest = max(map(len, ids))
    rooms = [longest - len(one) for one in ids]
    sides = [(0, room) if right else (room, 0) for room in rooms]
    padded = [pad(torch.tensor(one), side, value=PAD) for one, side in zip(ids, sides, strict=True)]
    masks = [
        pad(torch.ones(len(one), dtype=torch.long), side)
        for one, side in zip(ids, sides, strict=True)
    ]
    return {"input_ids": torch.stack(padded), "attention_mask": torch.stack(masks)}


def pictures(*lead: int, seed: int = 0) -> Tensor:
    """Pictures of a few flat areas, so that patches are alike."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(*lead, 3, 3, 3, generator=generator)
    flat = coarse.repeat_interleave(SIDE // 3, -1).repeat_interleave(SIDE // 3, -2)
    return flat + 0.1 * torch.randn(flat.shape, generator=generator)


def inputs(model: Any, right: bool = False) -> dict[str, Tensor]:
    """Return two prompts with two images and one, padded on the left or the right."""
    if "Qwen" in type(model).__name__:
        return qwen_inputs(model, right)
    return {**prompts(IMAGES, right), "pixel_values": pictures(3)}


def qwen_inputs(model: Any, right: bool = False) -> dict[str, Tensor]:
    folded = [[height * width // 4 for _, height, width in row] for row in GRIDS]
    call = prompts(folded, right)
    images = call["input_ids"] == IMAGE
    call["input_ids"][images.roll(-1, 1) & ~images] = START
    patches = sum(map(sum, folded)) * 4
    generator = torch.Generator().manual_seed(0)
    areas = torch.randn(5, 3 * 2 * PATCH**2, generator=generator)
    pixels = areas[torch.randint(5, (patches // 4,), generator=generator)].repeat_interleave(4, 0)
    call["pixel_values"] = pixels + 0.1 * torch.randn(pixels.shape, generator=generator)
    call["image_grid_thw"] = torch.tensor([grid for row in GRIDS for grid in row])
    return typed(model, call)


def typed(model: Any, call: dict[str, Tensor]) -> dict[str, Tensor]:
    """With what newer processors add."""
    if "mm_token_type_ids" in inspect.signature(model.model.get_rope_index).parameters:
        call["mm_token_type_ids"] = (call["input_ids"] == IMAGE).int()
    return call


def whole_by_hand(model: Any, picture: Tensor) -> tuple[Tensor, Tensor]:
    """All projected features [L, C] of one picture [3, h, w], and the tower's tokens."""
    with torch.no_grad():
        states = model.model.vision_tower(picture[None], output_hidden_states=True)
        strategy = model.config.vision_feature_select_strategy
        own = states.hidden_states[4][:, int(strategy == "default") :]
        features: Tensor = model.model.multi_modal_projector(own)[0]
    return features, own[0]


def joined_by_hand(features: Tensor, states: Tensor, keep: float) -> dict[int, Tensor]:
    """Return vectors by place: the farthest ones, each averaged with what is nearest to it."""
    count = len(features)
    like, near = (
        torch.cosine_similarity(x.double()[:, None], x.double(), dim=-1).tolist()
        for x in (features, states)
    )
    alone = [max(like[i][j] for j in range(count) if j != i) for i in range(count)]
    stay = [min(range(count), key=alone.__getitem__)]
    while len(stay) < max(1, round(keep * count)):
        left = {i: max(like[i][j] for j in stay) for i in range(count) if i not in stay}
        stay.append(min(left, key=left.__getitem__))
    groups: dict[int, list[int]] = {place: [place] for place in sorted(stay)}
    for i in range(count):
        if i not in groups:
            groups[max(stay, key=lambda j: near[i][j])].append(i)
    return {place: features[group].mean(0) for place, group in groups.items()}


def logits_by_hand(
    model: Any,
    ids: list[int],
    seen: list[list[Tensor | None]],
    new: int = 0,
    axes: list[list[int]] | None = None,
) -> tuple[Tensor, list[int]]:
    """Compute the logits of one prompt from scratch, and the `new` likeliest next tokens.

    For each image, `seen` has the vector of each image token, or None if it is removed. `axes` are
    the positions of the tokens of the whole prompt; if None, they are counted.
    """
    given = iter([one for image in seen for one in image])
    table = model.get_input_embeddings().weight
    rows, places = [], []
    lead = (1,) if axes is None else (3, 1)
    for place, token in enumerate(ids):
        vector = next(given) if token == IMAGE else table[token]
        if vector is not None:
            rows.append(vector)
            places.append([place] if axes is None else axes[place])
    written: list[int] = []
    with torch.no_grad():
        while True:
            states = model.model.language_model(
                inputs_embeds=torch.stack(rows)[None],
                position_ids=torch.tensor(places).T.reshape(*lead, -1),
                attention_mask=torch.ones(1, len(rows), dtype=torch.long),
            )
            logits = model.lm_head(states.last_hidden_state)[0]
            if len(written) == new:
                return logits, written
            written.append(int(logits[-1].argmax()))
            rows.append(table[written[-1]])
            places.append([place + 1 for place in places[-1]])


def by_hand(
    model: Any, keep: float, call: dict[str, Tensor], new: int = 0
) -> list[tuple[Tensor, list[int]]]:
    """Logits and `new` words of each prompt of `inputs`."""
    if "Qwen" in type(model).__name__:
        return qwen_by_hand(model, keep, call, new)
    seen = [joined_by_hand(*whole_by_hand(model, one), keep) for one in call["pixel_values"]]
    slots = [[one.get(place) for place in range(PATCHES)] for one in seen]
    found = []
    for row, images in enumerate((slice(0, 2), slice(2, 3))):
        real = call["input_ids"][row][call["attention_mask"][row].bool()].tolist()
        found.append(logits_by_hand(model, real, slots[images], new))
    return found


def qwen_by_hand(
    model: Any, keep: float, call: dict[str, Tensor], new: int = 0
) -> list[tuple[Tensor, list[int]]]:
    """Logits and `new` words of each prompt, each image in the tower alone."""
    found, start = [], 0
    for row, grids in enumerate(GRIDS):
        real = call["input_ids"][row][call["attention_mask"][row].bool()].tolist()
        slots: list[list[Tensor | None]] = []
        for grid in grids:
            pixels = call["pixel_values"][start : start + grid[1] * grid[2]]
            start += len(pixels)
            with torch.no_grad():
                output = model.model.get_image_features(
                    pixels, torch.tensor([grid]), return_dict=True
                )
            features = output.pooler_output[0]
            joined = joined_by_hand(features, features, keep)
            slots.append([joined.get(place) for place in range(len(features))])
        axes: list[list[int]] = []
        shapes, count = iter(grids), 0
        for before, token in zip([0, *real], real, strict=False):
            if token != IMAGE:
                axes.append([count] * 3)
                count += 1
            elif before != IMAGE:  # an image's first: its rows and columns at once
                _, down, across = next(shapes)
                for y in range(down // 2):
                    axes += [[count, count + y, count + x] for x in range(across // 2)]
                count += max(down, across) // 2
        found.append(logits_by_hand(model, real, slots, new, axes))
    return found
