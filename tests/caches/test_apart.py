"""compress_cache with other users of a model: threads, copies, other blocks, rotary states."""

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
from torch import Tensor, nn

from mame_sd.caches import compress_cache
from tests.caches.tiny import SHAPE, prompt, tiny


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


def test_assisted_generation_is_refused() -> None:
    model, ids = copy.deepcopy(tiny("llama")), prompt().repeat(1, 2)
    other = transformers.LlamaForCausalLM(model.config)  # it drafts tokens that are rejected
    with (
        compress_cache(model, 0.5),
        pytest.raises(ValueError, match=r"crop: expected .*; generate without assistant_model"),
    ):
        model.generate(ids, max_new_tokens=8, assistant_model=other)
    model.generation_config.prompt_lookup_num_tokens = 3
    with (
        pytest.raises(ValueError, match="prompt_lookup_num_tokens: expected none inside compress"),
        compress_cache(model, 0.5),
    ):
        pass
