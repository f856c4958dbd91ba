"""Qwen-VL with visual tokens that merge behind its tower, compared with loops."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from mame_sd import apply_mame, remove_mame
from tests.captions import tiny

VIDEO, START = 51, 52
GRIDS = [[(1, 4, 8), (1, 8, 4)], [(1, 6, 6)]]  # of two prompts: patches of each image


def qwen(older: bool = False) -> Any:
    """Patches are folded by 2 x 2, and windows are as wide as two folded ones."""
    torch.manual_seed(0)
    text = {
        "vocab_size": 60,
        "hidden_size": tiny.WIDTH,
        "intermediate_size": 2 * tiny.WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
        "initializer_range": 0.2,
        "pad_token_id": tiny.PAD,
        "eos_token_id": 59,
    }
    vision = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": tiny.PATCH,
        "initializer_range": 0.2,
        "hidden_size": tiny.WIDTH,
    }
    if older:
        vision["embed_dim"] = tiny.WIDTH
    else:
        vision.update(out_hidden_size=tiny.WIDTH, window_size=16, fullatt_block_indexes=[1])
        vision["intermediate_size"] = 2 * tiny.WIDTH
    ids = {"image_token_id": tiny.IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    kind = Qwen2VLForConditionalGeneration if older else Qwen2_5_VLForConditionalGeneration
    config = Qwen2VLConfig if older else Qwen2_5_VLConfig
    model = kind(config(text_config=text, vision_config=vision, **ids)).eval()
    model.lm_head.weight.data[tiny.IMAGE] = 0  # it writes no image tokens
    return model


def inputs(model: Any, right: bool = False) -> dict[str, Tensor]:
    folded = [[height * width // 4 for _, height, width in row] for row in GRIDS]
    call = tiny.prompts(folded, right)
    images = call["input_ids"] == tiny.IMAGE
    call["input_ids"][images.roll(-1, 1) & ~images] = START
    patches = sum(map(sum, folded)) * 4
    generator = torch.Generator().manual_seed(0)
    areas = torch.randn(5, 3 * 2 * tiny.PATCH**2, generator=generator)
    pixels = areas[torch.randint(5, (patches // 4,), generator=generator)].repeat_interleave(4, 0)
    call["pixel_values"] = pixels + 0.1 * torch.randn(pixels.shape, generator=generator)
    call["image_grid_thw"] = torch.tensor([grid for row in GRIDS for grid in row])
    return typed(model, call)


def typed(model: Any, call: dict[str, Tensor]) -> dict[str, Tensor]:
    """With what newer processors add."""
    if "mm_token_type_ids" in inspect.signature(model.model.get_rope_index).parameters:
        call["mm_token_type_ids"] = (call["input_ids"] == tiny.IMAGE).int()
    return call


def by_hand(
    model: Any, handle: Any, call: dict[str, Tensor], new: int = 0
) -> list[tuple[Tensor, list[int]]]:
    """Logits and `new` words of each prompt, each image in the tower alone."""
    found, start = [], 0
    for row, grids in enumerate(GRIDS):
        real = call["input_ids"][row][call["attention_mask"][row].bool()].tolist()
        slots: list[list[Tensor | None]] = []
        for grid in grids:
            own = call["pixel_values"][start : start + grid[1] * grid[2]]
            start += len(own)
            with torch.no_grad():
                output = model.model.get_image_features(own, torch.tensor([grid]), return_dict=True)
            features = output.pooler_output[0]
            joined = tiny.joined_by_hand(features, features, handle.config.keep)
            slots.append([joined.get(place) for place in range(len(features))])
        axes: list[list[int]] = []
        shapes, count = iter(grids), 0
        for before, token in zip([0, *real], real, strict=False):
            if token != tiny.IMAGE:
                axes.append([count] * 3)
                count += 1
            elif before != tiny.IMAGE:  # an image's first: its rows and columns at once
                _, down, across = next(shapes)
                for y in range(down // 2):
                    axes += [[count, count + y, count + x] for x in range(across // 2)]
                count += max(down, across) // 2
        found.append(tiny.logits_by_hand(model, real, slots, new, axes))
    return found


@pytest.mark.parametrize("older", [False, True])
def test_nothing_merged_is_equal_to_the_bit(older: bool) -> None:
    model = qwen(older)
    call = inputs(model)
    names = {"input_ids": tiny.PAD, "attention_mask": 0, "mm_token_type_ids": 0}
    for name, padding in names.items():  # the longest prompt is padded too
        if name in call:
            call[name] = torch.nn.functional.pad(call[name], (2, 0), value=padding)
    few = {"max_new_tokens": 3, "do_sample": False}
    before, written = model(**call).logits, model.generate(**call, **few)
    for nothing in ({"keep": 1.0}, {"keep": 0.25}):
        handle = apply_mame(model, **nothing)
        handle.active = nothing != {"keep": 0.25}
        assert torch.equal(model(**call).logits, before)
        assert torch.equal(model.generate(**call, **few), written)
    remove_mame(model)
    assert torch.equal(model(**call).logits, before)


@pytest.mark.parametrize(("keep", "older"), [(0.25, False), (0.6, True)])
def test_a_batch_and_what_is_written_equal_the_loop(keep: float, older: bool) -> None:
    model = qwen(older)
    call = inputs(model)
    handle = apply_mame(model, keep=keep)
    few = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    written = model.generate(**call, **few)
    assert handle.report().visual_after < handle.report().visual_before == 25 / 3
    whole = call["input_ids"].shape[1]
    assert torch.equal(written[:, :whole], call["input_ids"])
    found = by_hand(model, handle, call, new=4)
    expected = [words for _, words in found]
    assert written[:, whole:].tolist() == expected
    assert torch.equal(model.generate(**call, **few, use_cache=False), written)
    beams = model.generate(**call, **few, num_beams=2, num_return_sequences=2)
    assert torch.equal(beams[1, :whole], call["input_ids"][0])
    output, right = model(**call), model(**inputs(model, right=True)).logits
    mask = torch.zeros(2, output.logits.shape[1], dtype=torch.long)
    for row, (logits, _) in enumerate(found):
        prompt = logits[:-4]
        mask[row, -len(prompt) :] = 1
        for own in (output.logits[row, -len(prompt) :], right[row, : len(prompt)]):
            torch.testing.assert_close(own, prompt, rtol=1e-3, atol=1e-4)
    rows = [output.logits[:, -1].argmax(-1)]
    while len(rows) < 4:
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        output = model(
            input_ids=rows[-1][:, None],
            attention_mask=mask,
            **{tiny.CACHE: output[tiny.CACHE]},
        )
        rows.append(output.logits[:, -1].argmax(-1))
    assert torch.stack(rows, 1).tolist() == expected


def test_a_merged_call_leaves_nothing_behind() -> None:
    few = {"max_new_tokens": 3, "do_sample": False}
    words = tiny.prompts([[], []], seed=1)
    model = qwen()
    call = inputs(model)
    logits, written = model(**call).logits, model.generate(**call, **few)
    deltas = model.model.rope_deltas
    told = qwen().generate(**words, **few)
    one = {name: value[:1] for name, value in call.items() if name != "attention_mask"}
    one["image_grid_thw"] = call["image_grid_thw"][:2]
    one["pixel_values"] = call["pixel_values"][:64]
    token = torch.tensor([[7]])
    whole = typed(model, {**one, "input_ids": torch.cat([one["input_ids"], token], 1)})
    expected = model(**whole).logits[:, -1]
    for name, given in (("forward", call), ("generate", {**one, **few})):
        held = model(**one)[tiny.CACHE]
        apply_mame(model, keep=0.25)
        getattr(model, name)(**given)
        remove_mame(model)
        after = model(input_ids=token, **{tiny.CACHE: held}).logits[:, -1]
        torch.testing.assert_close(after, expected, rtol=1e-3, atol=1e-4)
    apply_mame(model, keep=0.25)
    short = model.generate(**call, **few)
    assert torch.equal(model.model.rope_deltas, deltas)  # of whole prompts, as without merging
    assert torch.equal(model.generate(**words, **few), told)
    assert torch.equal(model.generate(**call, **few), short)
    remove_mame(model)
    assert torch.equal(model.generate(**words, **few), told)
    assert torch.equal(model(**call).logits, logits)
    assert torch.equal(model.generate(**call, **few), written)


def test_refusals_are_one_line() -> None:
    model = qwen()
    call = inputs(model)
    apply_mame(model, keep=0.5)
    videos = {"pixel_values_videos": call["pixel_values"], "video_grid_thw": call["image_grid_thw"]}
    texts = {name: call[name] for name in ("input_ids", "attention_mask")}
    held = model.generate(**call, max_new_tokens=1, return_dict_in_generate=True)
    wrongs = [
        ({**call, **videos}, "pixel_values_videos: expected none"),
        ({**texts, **videos}, "pixel_values_videos: expected none"),
        ({**texts, tiny.CACHE: held[tiny.CACHE]}, "cache: expected an empty one"),
        ({**call, "cache_implementation": "static"}, "cache_implementation: expected none"),
    ]
    if "mm_token_type_ids" in call:
        untyped = {name: call[name] for name in call if name != "mm_token_type_ids"}
        wrongs.append((untyped, "mm_token_type_ids: expected the processor's"))
    for one, message in wrongs:
        with pytest.raises(ValueError, match=message) as raised:
            model.generate(**one)
        assert "\n" not in str(raised.value)
