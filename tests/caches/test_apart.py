"""compress_cache beside what else runs on a model: threads, copies, other blocks, rotary states."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from threading import Event, Thread, current_thread
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mame_sd.caches import compress_cache
from mame_sd.upstream import cache_of, with_cache
from tests.caches.tiny import SHAPE, padded, prompt, tiny


def answer(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits of 5 tokens that greedy search adds, [samples, 5, V]."""
    few = {"max_new_tokens": 5, "do_sample": False, "output_logits": True}
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **few)  # type: ignore[operator]
    return torch.stack(out.logits, 1)


def test_two_threads_at_once_are_answered_as_alone() -> None:
    """B is in the middle of its forward while A goes on from the middle of its own."""
    model, found, turn = copy.deepcopy(tiny("llama")), {}, Event()
    asked = {"A": prompt(100), "B": prompt(130, seed=1)}

    def meet(*_: Any) -> None:
        if current_thread().name == "A" and "B" not in found:
            found["B"] = None
            threads["B"].start()
            turn.wait(5)
        elif current_thread().name == "B" and not turn.is_set():
            turn.set()
            threads["A"].join(1)

    def run(name: str) -> None:
        with compress_cache(model, 0.25):
            found[name] = answer(model, asked[name])

    with compress_cache(model, 0.25):
        alone = {name: answer(model, ids) for name, ids in asked.items()}
    hook = model.model.layers[0].register_forward_hook(meet)
    threads = {name: Thread(target=run, args=(name,), name=name) for name in "AB"}
    threads["A"].start()
    for name in "AB":
        threads[name].join()
    assert all(torch.equal(found[name], alone[name]) for name in "AB")
    hook.remove()


def test_a_thread_is_inside_with_the_blocks_context_alone() -> None:
    model, ids = tiny("llama"), prompt(60)
    with ThreadPoolExecutor(1) as pool:
        plain = pool.submit(answer, model, ids).result()
        with compress_cache(model, 0.25):
            want = answer(model, ids)
            inside = copy_context()
            assert torch.equal(pool.submit(inside.run, answer, model, ids).result(), want)
            with pytest.raises(RuntimeError, match="expected prompts from a thread whose own"):
                pool.submit(answer, model, ids).result()
        assert torch.equal(pool.submit(answer, model, ids).result(), plain)
    assert not torch.equal(plain, want)


@settings(max_examples=3, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    sides=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    keep=st.sampled_from([0.05, 0.25, 0.6]),
    name=st.sampled_from(["llama", "qwen3"]),
)
def test_prompts_are_answered_as_alone(
    lengths: list[int], sides: list[int], keep: float, name: str
) -> None:
    """In one batch with padding on both sides, and in threads at once on one model."""
    model, most = tiny(name), 40
    asked = [prompt(n, seed=i) for i, n in enumerate(lengths)]

    def run(ids: Tensor) -> Tensor:
        with compress_cache(model, keep):
            return answer(model, ids)

    want = [run(ids) for ids in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        for one, other in zip(pool.map(run, asked), want, strict=True):
            assert torch.equal(one, other)
    parts = [padded(ids, side, most) for ids, side in zip(asked, sides, strict=False)]
    ids, mask = (torch.cat(t) for t in zip(*parts, strict=True))
    new = prompt(4, seed=9)
    whole = torch.cat([mask, torch.ones(len(asked), 4, dtype=torch.long)], 1)
    places = (whole.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        with compress_cache(model, keep) as handle:
            out = model(ids, attention_mask=mask, position_ids=places[:, :most], use_cache=True)
            handle.compressing = False
            got = model(
                new.expand(len(asked), -1),
                attention_mask=whole,
                position_ids=places[:, most:],
                **with_cache(model, cache_of(out)),
            ).logits
        for i, one in enumerate(asked):
            if one.shape[1] == 1:  # one token is no prompt that is cut
                continue
            with compress_cache(model, keep) as handle:
                cache = cache_of(model(one, use_cache=True))
                handle.compressing = False
                want_i = model(new, **with_cache(model, cache)).logits[0]
            torch.testing.assert_close(got[i], want_i, atol=5e-3, rtol=1e-3)


def test_a_copy_made_inside_is_not_merged() -> None:
    model, ids = tiny("llama"), prompt()
    plain = answer(model, ids)
    with compress_cache(model, 0.2):
        copied = pickle.loads(pickle.dumps(model))
        merged = answer(model, ids)
        assert torch.equal(answer(copied, ids), plain)
    assert torch.equal(answer(copied, ids), plain)
    with compress_cache(copied, 0.2):
        assert torch.equal(answer(copied, ids), merged)


def test_a_model_and_its_part_do_not_nest() -> None:
    model = tiny("llama")
    for outer, inner in ((model, model), (model, model.model), (model.model, model)):
        with (
            compress_cache(outer, 0.5),  # type: ignore[arg-type]
            pytest.raises(ValueError, match="its cache is compressed already"),
            compress_cache(inner, 0.5),  # type: ignore[arg-type]
        ):
            pass


def test_blocks_left_out_of_order_leave_nothing() -> None:
    ids, models = prompt(), [tiny("llama"), tiny("qwen3")]
    plain = [answer(m, ids) for m in models]
    stacks = [ExitStack(), ExitStack()]
    for stack, model in zip(stacks, models, strict=True):
        stack.enter_context(compress_cache(model, 0.2))
    stacks[0].close()
    assert torch.equal(answer(models[0], ids), plain[0])
    assert not torch.equal(answer(models[1], ids), plain[1])
    stacks[1].close()
    for model, want in zip(models, plain, strict=True):
        assert torch.equal(answer(model, ids), want)
        with compress_cache(model, 0.2):
            assert not torch.equal(answer(model, ids), want)


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_embeddings_are_left_as_they_are(kind: str) -> None:
    """Positions to come lie beyond what dynamic NTK and longrope change their frequencies at."""
    rope = {"rope_theta": 1e4, **ROPES[kind]}
    torch.manual_seed(0)
    fields = {**SHAPE, "max_position_embeddings": 64, "rope_parameters": rope}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).eval()
    ids, state = prompt(60), {}
    with torch.no_grad():
        for merged in (False, True):
            with ExitStack() as stack:
                if merged:
                    stack.enter_context(compress_cache(model, 0.5))
                logits = model(ids).logits
            rotary = model.model.rotary_emb
            state[merged] = [logits, rotary.inv_freq.clone(), model(ids[:, :50]).logits]
    for before, after in zip(state[False], state[True], strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("how", ["assistant_model", "config"])
def test_assisted_generation_is_refused_at_once(how: str) -> None:
    model, ids, seen = copy.deepcopy(tiny("llama")), prompt().repeat(1, 2), []
    given = {} if how == "config" else {how: copy.deepcopy(model)}
    if how == "config":
        model.generation_config.prompt_lookup_num_tokens = 3  # type: ignore[union-attr]
    model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    with (
        pytest.raises(ValueError, match="assistant_model, prompt_lookup_num_tokens: expected none"),
        compress_cache(model, 0.5),
    ):
        model.generate(ids, max_new_tokens=8, **given)  # type: ignore[operator]
    assert not seen
