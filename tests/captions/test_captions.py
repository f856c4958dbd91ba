"""Captioners whose visual tokens merge: equal to loops, bit-equal if nothing merges, refusals."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from mame_sd import MaMeConfig, apply_mame, remove_mame
from mame_sd.captions.farthest import merged
from mame_sd.compat import cache_of, with_cache
from tests.captions import tiny

TOWERS = ("CLIPVisionModel", "SiglipVisionModel")
PATCHES = tiny.PATCHES
MODELS: dict[str, Callable[[], Any]] = {
    "LLaVA": tiny.llava,
    "Qwen2-VL": partial(tiny.qwen, older=True),
    "Qwen2.5-VL": tiny.qwen,
}
each_model = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)


@each_model
def test_nothing_merged_is_equal_to_the_bit(build: Callable[[], Any]) -> None:
    model = build()
    call = tiny.inputs(model)
    names = {"input_ids": tiny.PAD, "attention_mask": 0, "mm_token_type_ids": 0}
    for name, padding in names.items():  # the longest prompt is padded too
        if name in call:
            call[name] = torch.nn.functional.pad(call[name], (2, 0), value=padding)
    few: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    before, written = model(**call).logits, model.generate(**call, **few)
    for nothing in ({"keep": 1.0}, {}):
        handle = apply_mame(model, **nothing)
        handle.active = bool(nothing)
        assert torch.equal(model(**call).logits, before)
        assert torch.equal(model.generate(**call, **few), written)
    remove_mame(model)
    assert not {"forward", "generate"} & model.__dict__.keys()
    assert torch.equal(model(**call).logits, before)


@each_model
def test_a_batch_of_unequal_lengths_and_its_words_equal_the_loop(build: Callable[[], Any]) -> None:
    model = build()
    call = tiny.inputs(model)
    handle: Any = apply_mame(model, keep=0.5)
    new: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    written = model.generate(**call, **new)
    assert handle.report().layers[0].share < 1
    whole = call["input_ids"].shape[1]
    assert torch.equal(written[:, :whole], call["input_ids"])
    by_hand = tiny.by_hand(model, 0.5, call, new=4)
    words = [words for _, words in by_hand]
    assert written[:, whole:].tolist() == words
    assert torch.equal(model.generate(**call, **new, use_cache=False), written)
    output, right = model(**call), model(**tiny.inputs(model, right=True)).logits
    mask = torch.zeros(2, output.logits.shape[1], dtype=torch.long)
    for row, (logits, _) in enumerate(by_hand):
        prompt = logits[:-4]
        mask[row, -len(prompt) :] = 1
        for part in (output.logits[row, -len(prompt) :], right[row, : len(prompt)]):
            torch.testing.assert_close(part, prompt, rtol=1e-3, atol=1e-4)
    rows = [output.logits[:, -1].argmax(-1)]
    while len(rows) < 4:  # calls that go on from the cache
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        again = {"attention_mask": mask, tiny.CACHE: output[tiny.CACHE]}
        output = model(input_ids=rows[-1][:, None], **again)
        rows.append(output.logits[:, -1].argmax(-1))
    assert torch.stack(rows, 1).tolist() == words
    held = model.generate(**call, **{**new, "max_new_tokens": 2}, return_dict_in_generate=True)
    assert held[tiny.CACHE].get_seq_length() == max(len(one) for one, _ in by_hand) - 3


def test_beams_of_a_batch_are_those_of_each_prompt() -> None:
    model = tiny.llava()
    call = tiny.inputs(model)
    apply_mame(model, keep=0.5)
    several: dict[str, Any] = {"max_new_tokens": 4, "num_beams": 2, "num_return_sequences": 2}
    beams = model.generate(**call, **several)
    for row, images in enumerate((slice(0, 2), slice(2, 3))):  # each prompt's are its own
        alone = {name: call[name][row : row + 1] for name in ("input_ids", "attention_mask")}
        alone["pixel_values"] = call["pixel_values"][images]
        assert torch.equal(beams[2 * row : 2 * row + 2], model.generate(**alone, **several))


def test_calls_in_a_row_write_what_generate_does() -> None:
    model = tiny.llava()
    call = {**tiny.prompts([[PATCHES]]), "pixel_values": tiny.pictures(1)}
    apply_mame(model, keep=0.25)
    written = model.generate(**call, max_new_tokens=4, do_sample=False, eos_token_id=None)
    del call["attention_mask"]  # positions have gaps, and are one text all the same
    output, found = model(**call), []
    while len(found) < 4:
        found.append(int(output.logits[0, -1].argmax()))
        token = torch.tensor([found[-1:]])
        output = model(input_ids=token, **with_cache(model, cache_of(output)))
    assert written[0, -4:].tolist() == found
    token = torch.tensor([found[:1]])
    logits, cache = model(**call, return_dict=False)[:2]
    assert int(logits[0, -1].argmax()) == found[0]
    assert (
        int(model(input_ids=token, **with_cache(model, cache)).logits[0, -1].argmax()) == found[1]
    )


def test_copies_join_and_what_is_apart_stays() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, dtype=torch.float64).repeat_interleave(4, 1)
    for own, places, whole in zip(*merged(x, x, 0.25), x, strict=True):
        assert sorted(place // 4 for place in places.tolist()) == [0, 1, 2]
        torch.testing.assert_close(own, whole[places])
    for dtype in (torch.float16, torch.bfloat16):
        found, places = merged(x.to(dtype), x, 0.25)
        assert found.dtype == dtype
        torch.testing.assert_close(found[0], x[0].to(dtype)[places[0]])
    grown = x.clone().requires_grad_()
    merged(grown, x, 0.25)[0].sum().backward()
    torch.testing.assert_close(grown.grad, torch.full_like(grown, 0.25))


def test_other_texts_in_a_generate_keep_their_own_positions() -> None:
    model, call = tiny.llava(), tiny.inputs(None)
    apply_mame(model, keep=0.25)
    text = torch.tensor([[3, 4, 5, 6]])
    alone = model(input_ids=text).logits
    plain = model.generate(**call, max_new_tokens=3, do_sample=False, eos_token_id=None)

    def look(ids: Tensor, scores: Tensor) -> Tensor:
        torch.testing.assert_close(model(input_ids=text).logits, alone)
        model.generate(**call, max_new_tokens=2, do_sample=False)
        return scores

    written = model.generate(
        **call, max_new_tokens=3, do_sample=False, eos_token_id=None, logits_processor=[look]
    )
    assert torch.equal(written, plain)


def test_a_token_that_is_not_finite_stays_alone_and_autocast_changes_nothing() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 12, 8)
    clean = merged(x, x, 0.5)[1]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(merged(x, x, 0.5)[1], clean)
    x[0, 3] = torch.nan
    own, places = merged(x, x, 0.5)
    assert 3 in places.tolist()[0]
    assert own.isfinite().all(2).sum() == places.shape[1] - 1


def test_labels_of_image_tokens_go_with_them() -> None:
    model = tiny.llava(tiny.SIGLIP, vision_feature_select_strategy="full")
    call = tiny.inputs(model, right=True)  # on the left a first word is foretold from padding
    outside = (call["input_ids"] == tiny.IMAGE) | (call["attention_mask"] == 0)
    apply_mame(model, keep=0.5)
    output = model(**call, labels=call["input_ids"].masked_fill(outside, -100))
    losses: list[Tensor] = []
    stay = round(0.5 * PATCHES)
    for row, (logits, _) in enumerate(tiny.by_hand(model, 0.5, call)):
        real = call["input_ids"][row][call["attention_mask"][row].bool()]
        words, images = real[real != tiny.IMAGE].tolist(), len(tiny.IMAGES[row])
        labels = words[:3]
        for number in range(images):
            labels += [-100] * stay + words[3 + 2 * number :][:2]
        assert len(labels) == len(logits)
        heard = torch.tensor(labels[1:])
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], heard, reduction="none"))
        losses[-1] = losses[-1][heard >= 0]
    torch.testing.assert_close(output.loss, torch.cat(losses).mean(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("first", [True, False])
def test_offloading_goes_before_merging_or_after_it(first: bool) -> None:
    model, call = tiny.llava(), tiny.inputs(None)
    few: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    plain = model(**call).logits
    apply_mame(model, keep=0.25)
    merged, written = model(**call).logits, model.generate(**call, **few)
    if first:
        remove_mame(model)
        cpu_offload(model, torch.device("cpu"))
        apply_mame(model, keep=0.25)
    else:
        cpu_offload(model, torch.device("cpu"))
    assert torch.equal(model(**call).logits, merged)
    assert torch.equal(model.generate(**call, **few), written)
    remove_mame(model)
    assert torch.equal(model(**call).logits, plain)
    remove_hook_from_module(model, recurse=True)
    apply_mame(model, keep=0.25)
    assert torch.equal(model(**call).logits, merged)
    remove_mame(model)
    model.forward = partial(model.forward)
    with pytest.raises(ValueError, match="with its own forward, found another tool's"):
        apply_mame(model)


def test_merging_is_taken_off_under_a_tool_that_wrapped_forward_later() -> None:
    model, call = tiny.llava(), tiny.inputs(None)
    plain = model(**call).logits
    apply_mame(model, keep=0.25)
    model.forward = partial(model.forward)
    assert not torch.equal(model(**call).logits, plain)
    remove_mame(model)
    assert torch.equal(model(**call).logits, plain)


def test_settings_change_and_are_reported() -> None:
    model, call = tiny.llava(), tiny.inputs(None)
    handle: Any = apply_mame(model, MaMeConfig(keep=0.5))
    for keep in (0.5, 0.25):
        handle.set(keep=keep)
        handle.reset()
        model(**call)
        assert f"36 -> {keep * PATCHES:.1f} visual tokens" in str(handle.report())


def test_refusals_are_one_line() -> None:
    model, call = tiny.llava(), tiny.inputs(None)
    layers = copy.deepcopy(model)
    layers.config.vision_feature_layer = [-2, -3]
    with pytest.raises(ValueError, match="vision_feature_layer: expected one layer"):
        apply_mame(layers, keep=0.5)
    handle: Any = apply_mame(model, keep=0.5)
    for bad, message in (
        ({"blocks": 2}, "unknown setting 'blocks'"),
        ({"tau": 0.5}, "tau: expected only keep for the visual tokens"),
        ({"keep": 0.5, "min_tokens": 5}, "min_tokens: expected only keep"),
        ({"mlp_keep": 0.5}, "mlp_keep: expected only keep"),
        ({"block_keep": 0.5}, "block_keep: expected only keep"),
        ({"keep": 1.5}, "keep: "),
        ({"keep": 0.5, "tau": 0.5}, "expected tau or keep, got both"),
    ):
        for change in (handle.set, partial(apply_mame, model)):
            with pytest.raises(ValueError, match=message):
                change(**bad)
    with pytest.raises(TypeError, match="config: expected a MaMeConfig"):
        handle.set({"keep": 0.5})
    assert handle.config == MaMeConfig(keep=0.5)
    assert handle.installed
    cache = model(**{name: call[name] for name in ("input_ids", "attention_mask")})[tiny.CACHE]
    short = {**call, "input_ids": call["input_ids"][:, 1:]}
    short["attention_mask"] = call["attention_mask"][:, 1:]
    short["input_ids"] = short["input_ids"].masked_fill(
        torch.arange(short["input_ids"].shape[1]) == short["input_ids"].shape[1] - 3, 7
    )
    for wrong, message in (
        (short, "expected 108 image tokens in the prompts for 3 images, got 106"),
        ({**call, tiny.CACHE: cache}, "cache: expected an empty one"),
        ({**call, "inputs_embeds": torch.zeros(2, 3, 32)}, "inputs_embeds: expected none"),
        ({**call, "vision_feature_layer": -1}, "vision_feature_layer: expected that of"),
        ({**call, "attention_mask": torch.ones(2, 1, 3, 3)}, "attention_mask: expected \\[B, L\\]"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            model(**wrong)
        assert "\n" not in str(raised.value)
    from transformers import Qwen3VLForConditionalGeneration

    with torch.device("meta"):
        refused = Qwen3VLForConditionalGeneration.__new__(Qwen3VLForConditionalGeneration)
        torch.nn.Module.__init__(refused)
    with pytest.raises(ValueError, match="got Qwen3VLForConditionalGeneration: first layers"):
        apply_mame(refused)


@pytest.mark.parametrize("gone", ["cache", "tower"])
def test_a_name_that_transformers_dropped_is_refused_on_entry(gone: str) -> None:
    model: Any = tiny.llava()
    own = inspect.signature(type(model).forward)
    names = [
        name for name in own.parameters if gone not in (name, name.replace(tiny.CACHE, "cache"))
    ]

    def forward(self: Any) -> None: ...

    forward.__signature__ = own.replace(parameters=[own.parameters[name] for name in names])  # type: ignore[attr-defined]
    model.__class__ = type("LlavaForConditionalGeneration", (type(model),), {"forward": forward})
    if gone == "tower":
        del model.model.vision_tower
    with pytest.raises(RuntimeError, match=r"expected .* of Llava.*; install a release"):
        apply_mame(model)


def gemma3() -> Any:
    """Build a tiny model that reads images and isn't registered."""
    vision = {**tiny.SIGLIP.to_dict(), "num_hidden_layers": 2, "model_type": "siglip_vision_model"}
    text = {"vocab_size": 60, "hidden_size": tiny.WIDTH, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": tiny.PAD}
    config = Gemma3Config(
        text_config={**text, **heads, "model_type": "gemma3_text"}, vision_config=vision
    )
    return Gemma3ForConditionalGeneration(config)


@pytest.mark.parametrize(
    "build", [gemma3, lambda: tiny.llava().model], ids=["Gemma3", "LlavaModel"]
)
def test_other_models_that_read_images_are_no_vision_transformers(build: Any) -> None:
    with torch.device("meta"):
        model = build()
    with pytest.raises(ValueError, match=f"got {type(model).__name__}, .*image") as told:
        apply_mame(model, keep=0.5)
    assert "\n" not in str(told.value)
    remove_mame(model)
    tower = next(one for one in model.modules() if type(one).__name__ in TOWERS)
    handle: Any = apply_mame(tower, keep=0.9)  # a tower alone is one
    assert handle.installed


def test_a_merged_call_of_qwen_leaves_nothing_behind() -> None:
    few = {"max_new_tokens": 3, "do_sample": False}
    words = tiny.prompts([[], []], seed=1)
    model = tiny.qwen()
    call = tiny.inputs(model)
    logits, written = model(**call).logits, model.generate(**call, **few)
    deltas = model.model.rope_deltas
    told = tiny.qwen().generate(**words, **few)
    one = {name: value[:1] for name, value in call.items() if name != "attention_mask"}
    one["image_grid_thw"] = call["image_grid_thw"][:2]
    one["pixel_values"] = call["pixel_values"][:64]
    token = torch.tensor([[7]])
    whole = tiny.typed(model, {**one, "input_ids": torch.cat([one["input_ids"], token], 1)})
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


def test_refusals_of_qwen_are_one_line() -> None:
    model = tiny.qwen()
    call = tiny.inputs(model)
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
