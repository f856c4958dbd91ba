"""Test that calls of one captioner don't affect one another: threads, blocks, copies, padding."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import BaseStreamer

from mame_sd import MaMeConfig, apply_mame, remove_mame
from mame_sd.compat import cache_of, with_cache
from tests.captions import tiny

PATCHES = tiny.PATCHES
FEW = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
HALF, QUARTER = {"keep": 0.5}, {"keep": 0.25}


def ask(rows: list[int], seed: int = 0, right: bool = False) -> dict[str, Tensor]:
    """Prompts with so many pictures each."""
    prompts = tiny.prompts([[PATCHES] * count for count in rows], right, seed)
    return {**prompts, "pixel_values": tiny.pictures(sum(rows), seed=seed)}


def words(model: Any, call: dict[str, Tensor], **more: Any) -> list[list[int]]:
    written = model.generate(**call, **{**FEW, **more})
    assert torch.equal(
        written[:: len(written) // len(call["input_ids"])][:, : whole(call)], call["input_ids"]
    )
    found: list[list[int]] = written[:, whole(call) :].tolist()
    return found


def whole(call: dict[str, Tensor]) -> int:
    return call["input_ids"].shape[1]


def at_once(users: list[Callable[[Any], Any]]) -> list[Any]:
    """Return what users return who write their words in turns, or the message of their error."""
    found: list[Any] = [None] * len(users)
    step = threading.Barrier(len(users), timeout=60)

    def turns(ids: Tensor, scores: Tensor) -> Tensor:
        step.wait()
        return scores

    def run(number: int) -> None:
        try:
            found[number] = users[number]([turns])
        except Exception as error:
            found[number] = str(error)
            step.abort()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(users))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return found


@pytest.mark.parametrize("seed", [0, 2])
def test_threads_write_what_they_write_alone(seed: int) -> None:
    drawn = random.Random(seed)
    model: Any = tiny.qwen() if seed == 2 else tiny.llava()
    base = {"keep": drawn.choice((0.2, 0.5))}
    own = [None, {"keep": 0.35}, {"keep": 0.9}]  # None: what is there for all
    asks = [
        ask([drawn.randint(1, 3)], seed=drawn.randint(0, 99), right=drawn.random() < 0.5)
        for _ in own
    ]
    asks = [tiny.inputs(model)] * 3 if seed == 2 else asks

    def user(number: int, form: Any) -> Callable[[Any], Any]:
        def write(watchers: Any) -> list[list[int]]:
            with nullcontext() if form is None else handle.using(**form):
                return words(model, asks[number], logits_processor=watchers)

        return write

    users = [user(number, form) for number, form in enumerate(own)]
    plain = words(model, asks[0])
    handle = apply_mame(model, **base)
    alone = [write([]) for write in users]
    assert at_once(users) == alone
    remove_mame(model)
    assert words(model, asks[0]) == plain
    assert "generate" not in model.__dict__


def test_an_answer_keeps_the_settings_it_began_with() -> None:
    model, call = tiny.llava(), ask([2, 1])
    plain = words(model, call)
    handle = apply_mame(model, **QUARTER)
    merged = words(model, call)
    assert merged != plain

    def other(ids: Tensor, scores: Tensor) -> Tensor:
        with handle.using(**HALF):
            assert words(model, call) != merged
        return scores

    def none(ids: Tensor, scores: Tensor) -> Tensor:
        remove_mame(model)
        return scores

    for change in (other, none):
        assert words(model, call, logits_processor=[change]) == merged
    assert "forward" not in model.__dict__
    assert words(model, call) == plain


def test_blocks_end_in_any_order_and_copies_merge_until_removed() -> None:
    model, call = tiny.llava(), ask([2])
    plain = words(model, call)
    handle = apply_mame(model, **HALF)
    merged = words(model, call)
    same = MaMeConfig(**QUARTER)
    with handle.using(same):
        with handle.using(same):
            pass
        assert handle.config is same, "the outer of two blocks with the same settings stays open"
    assert handle.config == MaMeConfig(**HALF)
    first, second = handle.using(keep=0.75), handle.using(**QUARTER)
    first.__enter__()
    second.__enter__()
    inner = words(model, call)
    twin = copy.deepcopy(copy.deepcopy(model))
    first.__exit__(None, None, None)
    assert words(model, call) == inner != merged
    second.__exit__(None, None, None)
    assert words(model, call) == merged
    assert words(twin, call) == merged, "settings of a block belong to the original's handle"
    handle.remove()
    assert words(twin, call) == merged
    remove_mame(twin)
    assert words(twin, call) == words(model, call) == plain
    fresh = tiny.llava()  # one that was called has hooks of transformers that can't be pickled
    with apply_mame(fresh, **HALF):
        twin = pickle.loads(pickle.dumps(fresh))
    assert words(twin, call) == merged
    assert words(fresh, call) == plain


@pytest.mark.parametrize("seed", range(2))
def test_padding_on_any_side_changes_no_words(seed: int) -> None:
    drawn = random.Random(seed)
    model, right = tiny.llava(), bool(seed % 2)
    rows = [drawn.randint(1, 2) for _ in range(3)]
    call = ask([*rows, 3], seed, right)
    call["input_ids"] = torch.nn.functional.pad(call["input_ids"], (1, 1), value=tiny.PAD)
    call["attention_mask"] = torch.nn.functional.pad(call["attention_mask"], (1, 1))
    none = {"eos_token_id": None, "min_new_tokens": None, "streamer": None}
    before, written = model(**call, labels=None).logits, words(model, call, **none)
    apply_mame(model, keep=1.0)
    assert torch.equal(model(**call, labels=None).logits, before)
    assert words(model, call, **none) == written
    apply_mame(model, **HALF)
    logits, start = model(**call).logits, 0
    for row, count in enumerate([*rows, 3]):
        real = call["attention_mask"][row].bool()
        alone = {
            "input_ids": call["input_ids"][row][real][None],
            "pixel_values": call["pixel_values"][start : start + count],
        }
        start += count
        expected = model(**alone).logits[0]
        first = int((logits[row, :, 0] - expected[0, 0]).abs().argmin())
        own = logits[row, first : first + len(expected)]
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-3)
    if not right:
        call["input_ids"] = call["input_ids"][:, :-1]
        call["attention_mask"] = call["attention_mask"][:, :-1]
        assert words(model, call)[-1] == words(model, alone)[0]


class Heard(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None: ...


def test_what_watches_is_shown_whole_prompts_and_lengths_are_theirs() -> None:
    model, call = tiny.llava(), ask([2])
    apply_mame(model, **QUARTER)
    length, streamer, seen = whole(call), Heard(), []

    def look(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids.shape[1])
        return scores

    expected = words(model, call, max_new_tokens=5)
    config = GenerationConfig(max_length=length + 5, do_sample=False, eos_token_id=None)
    more = {"generation_config": config, "logits_processor": [look], "streamer": streamer}
    written = model.generate(**call, **more)[0].tolist()
    assert written == streamer.tokens == call["input_ids"][0].tolist() + expected[0]
    assert seen == [length + n for n in range(5)]
    seen.clear()
    beams = {"num_beams": 2, "num_return_sequences": 2, "logits_processor": [look]}
    words(model, ask([1, 2]), **beams)
    assert set(seen) == {whole(ask([1, 2])) + n for n in range(4)}
    with pytest.raises(ValueError, match=f"Input length of input_ids is {length}.*max_length"):
        model.generate(**call, max_length=3)


def test_assisted_generation_is_refused_before_the_tower_runs() -> None:
    model, call = tiny.llava(), ask([1])
    handle: Any = apply_mame(model, **QUARTER)
    for again in (
        {"assistant_model": tiny.llava().model.language_model},
        {"generation_config": GenerationConfig(assistant_early_exit=1)},
        {"prefill_chunk_size": 3},
        {},
    ):
        if not again:
            model.generation_config.prompt_lookup_num_tokens = 2
        with pytest.raises(ValueError, match="expected none with images whose patches merge, g"):
            model.generate(**call, **FEW, **again)
    assert handle.report().images == 0
    text = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, do_sample=False)
    assert text.shape == (1, 5)


def test_prompts_with_anothers_image_or_a_filled_cache_are_refused() -> None:
    model, call = tiny.llava(), ask([1])
    apply_mame(model, **QUARTER)
    mixed = ask([1, 1])  # an image token of the first prompt in the second
    first = int((mixed["input_ids"][0] == tiny.IMAGE).int().argmax())
    mixed["input_ids"][0, first], mixed["input_ids"][1, 0] = 3, tiny.IMAGE
    with pytest.raises(ValueError, match="expected 36 image tokens in the prompts for 1 images"):
        model.generate(**mixed, **FEW)
    held = model(**call)
    ids = torch.cat([call["input_ids"], torch.tensor([[3]])], 1)
    with pytest.raises(ValueError, match="give the whole conversation at once"):
        model.generate(ids, max_new_tokens=2, **with_cache(model, cache_of(held)))


def test_a_copy_made_while_an_answer_is_written_is_unmerged_whole() -> None:
    model, copies = tiny.llava(), []
    apply_mame(model, **HALF)

    def look(ids: Tensor, scores: Tensor) -> Tensor:
        copies.append(copy.deepcopy(model))
        return scores

    words(model, ask([1]), max_new_tokens=1, min_new_tokens=1, logits_processor=[look])
    remove_mame(copies[0])
    assert not {"forward", "generate"} & vars(copies[0]).keys()
