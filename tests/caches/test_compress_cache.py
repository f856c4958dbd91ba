"""compress_cache on real decoder classes: generation, chunks, padding, beams, refusals."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache, cache_utils

from mame_sd.caches import CacheView, Kept, Selection, compress_cache
from mame_sd.caches.attention import attention_layers
from mame_sd.caches.layer import CompressedLayer
from mame_sd.compat import with_cache
from mame_sd.report import NothingMergedError
from tests.caches.tiny import MODELS, SHAPE, padded, prompt, tiny


class Everything(Selection):
    """Keep every key, so that later tokens run over a compressed layer with the same output."""

    def score_layer(self, view: CacheView, keep: float) -> Any: ...

    def lengths(self, views: Sequence[CacheView], scored: Any, keep: float) -> Tensor:
        return torch.stack([view.counts() for view in views])

    def shorten(self, view: CacheView, scored_layer: Any, length: Tensor) -> Kept:
        return view


def newest(view: CacheView) -> Tensor:
    """Score keys by their place, as a user would."""
    return view.slots.float()


# StableLM of transformers 5.0 and 5.1 itself can't go on by several tokens.
OLD = not hasattr(transformers.models.stablelm.modeling_stablelm, "create_causal_mask")
GO_ON = [name for name in MODELS if name != "stablelm" or not OLD]


def generated(model: nn.Module, ids: Tensor, **fields: Any) -> Tensor:
    """Return the tokens that greedy search or beams add."""
    few = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8}
    return model.generate(ids, **{**few, **fields})[:, ids.shape[1] :]  # type: ignore[operator]


@pytest.mark.parametrize(("name", "full"), [("llama", (0, 1)), ("gemma3", (1,))])
def test_models_generate_with_a_shorter_cache(name: str, full: tuple[int, ...]) -> None:
    model, ids = tiny(name), prompt()
    cache = DynamicCache(config=model.config)
    with compress_cache(model, 0.25) as handle:
        generated(model, ids, **with_cache(model, cache))
    report = handle.report()
    assert tuple(layer.name for layer in report.layers) == tuple(f"layer {n}" for n in full)
    for index in full:
        layer = cache.layers[index]
        assert isinstance(layer, CompressedLayer)
        assert layer.get_seq_length() == 48 + 7
        assert layer.keys.shape[2] == layer.slots.shape[2] < 48
        assert layer.slots[0, :, -8:].tolist() == [list(range(47, 55))] * 2
    assert 0.22 * report.bytes_before < report.bytes_after <= 0.25 * report.bytes_before


@pytest.mark.parametrize(
    ("name", "attention"), [*((name, "sdpa") for name in GO_ON), ("llama", "eager")]
)
def test_a_cache_that_keeps_everything_gives_the_same(name: str, attention: str) -> None:
    model, new = tiny(name, attention), prompt(9, seed=1)

    def run() -> list[Tensor]:
        cache = DynamicCache(config=model.config)
        parts = (prompt(), new[:, :5], new[:, 5:6])
        return [model(ids, **with_cache(model, cache)).logits for ids in parts]

    with torch.no_grad():
        want = run()
        with compress_cache(model, 0.5, Everything()):
            got = run()
    for one, two in zip(want, got, strict=True):
        torch.testing.assert_close(two, one, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"prefill_chunk_size": 20}])
def test_beams_and_chunks_go_on_from_short_caches(how: dict[str, Any]) -> None:
    model, ids, cache = tiny("llama"), prompt(40, 2), DynamicCache()
    mask = torch.ones_like(ids)
    mask[0, :11] = 0

    def run() -> Tensor:
        given = with_cache(model, DynamicCache())
        return generated(model, ids, attention_mask=mask, **given, **how)

    want = run()
    with compress_cache(model, 0.5, Everything()):
        assert torch.equal(run(), want)
    with compress_cache(model, 0.5) as handle:
        out = generated(model, ids, **with_cache(model, cache), max_new_tokens=12, **how)
    assert out.shape == (2, 12)
    assert cache.get_seq_length() == 51
    held = sum(layer.tokens_kept for layer in handle.report().layers) / 2
    assert held <= 0.5 * 40 + 1
    stored = sum(layer.keys.shape[2] for layer in cache.layers) / 2  # as long as the longest sample
    assert held + 11 <= stored < 40


@pytest.mark.parametrize(
    ("name", "left", "tokens"), [("llama", 12, 40), ("llama", 0, 4), ("qwen3", 5, 40)]
)
def test_a_padded_sample_is_answered_as_alone(name: str, left: int, tokens: int) -> None:
    model, ids = tiny(name), prompt(tokens)
    long, mask = padded(ids, left, tokens + 12)
    other = prompt(tokens + 12, seed=3)
    # The third is of padding alone.
    batch = torch.cat([long, other, torch.zeros_like(other)])
    masks = torch.cat([mask, torch.ones_like(mask), torch.zeros_like(mask)])
    new = prompt(6, seed=1)
    with torch.no_grad(), compress_cache(model, 0.3) as handle:
        alone, both = DynamicCache(), DynamicCache()
        model(ids, **with_cache(model, alone))
        places = (masks.cumsum(1) - 1).masked_fill(masks == 0, 99)  # padding stands anywhere
        model(batch, attention_mask=masks, position_ids=places, **with_cache(model, both))
        handle.keep = 1
        want = model(new, **with_cache(model, alone)).logits
        whole = torch.cat([masks, torch.ones(3, 6, dtype=torch.long)], 1)
        later = (whole.cumsum(1) - 1)[:, -6:]
        got = model(
            new.expand(3, -1), attention_mask=whole, position_ids=later, **with_cache(model, both)
        ).logits
    torch.testing.assert_close(got[:1], want, atol=2e-3, rtol=1e-3)
    assert (got[1] - want[0]).abs().max() > 0.1
    assert got.isfinite().all()


def test_all_of_a_cache_is_bit_equal() -> None:
    model, ids = tiny("qwen3"), prompt()
    with torch.no_grad():
        want = model(ids).logits
        plain = generated(model, ids, output_logits=True, return_dict_in_generate=False)
        with compress_cache(model, 1) as handle:
            assert torch.equal(model(ids).logits, want)
            assert torch.equal(generated(model, ids), plain)
    assert str(handle.report()) == "nothing was compressed"


@torch.no_grad()
def test_the_default_device_is_not_the_model_s() -> None:
    model, ids = tiny("llama"), prompt()
    caches = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with compress_cache(model, keep=0.5):
        model(ids, past_key_values=caches[0])
    with torch.device("meta"), compress_cache(model, keep=0.5):
        model(ids, past_key_values=caches[1])
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.equal(one.keys, other.keys)


def test_leaving_takes_everything_back() -> None:
    model, ids = tiny("llama"), prompt()

    def hooks() -> list[dict[int, Any]]:
        return [{**m._forward_hooks, **m._forward_pre_hooks} for m in model.modules()]

    want, before = generated(model, ids), hooks()
    with compress_cache(model, 0.2):
        generated(model, ids)
    with pytest.raises(IndexError), compress_cache(model, 0.2):
        model(torch.tensor([[999]]))
    assert hooks() == before
    assert torch.equal(generated(model, ids), want)


def test_a_block_that_compressed_nothing_says_so() -> None:
    model, ids = tiny("llama"), prompt()

    def run(end: Exception | None, *prompts: Tensor) -> None:
        with torch.no_grad(), compress_cache(model, 0.5):
            for each in prompts:
                model(each, use_cache=False)
            if end:
                raise end

    with pytest.raises(NothingMergedError, match="but 2 of several tokens ran and no layer was"):
        run(None, ids, ids)
    with pytest.raises(KeyError):
        run(KeyError(), ids)
    run(None, ids[:, :1])
    run(None)


def test_a_later_chunk_changes_no_earlier_output() -> None:
    model, first, later = tiny("llama"), prompt(40), [prompt(20, seed=s) for s in (1, 2)]
    outputs = []
    for chunk in later:
        cache, parts = DynamicCache(), (first, chunk[:, :10], chunk[:, 10:])
        with torch.no_grad(), compress_cache(model, 0.5):
            found = [model(part, **with_cache(model, cache)).logits for part in parts]
        outputs.append(torch.cat(found, 1))
    same = (later[0] == later[1]).long().cumprod(1).sum()
    assert torch.equal(outputs[0][:, : 40 + same], outputs[1][:, : 40 + same])
    assert not torch.equal(outputs[0], outputs[1])


def test_an_empty_or_cropped_layer() -> None:
    model, ids, cache = tiny("llama"), prompt(), DynamicCache()
    with torch.no_grad(), compress_cache(model, 0.5) as handle:
        model(ids, **with_cache(model, cache))
        handle.keep = 1
        want = model(ids[:, :4], **with_cache(model, cache)).logits
        cache.crop(-4)
        assert torch.equal(model(ids[:, :4], **with_cache(model, cache)).logits, want)
        with pytest.raises(
            ValueError, match="at most the 4 tokens that came after the compression, got 5"
        ):
            cache.layers[0].crop(-5)
        cache.reset()
        assert cache.get_seq_length() == 0
        two = prompt(48, 2, seed=1)
        whole = model(two).logits
        first = model(two[:, :40], **with_cache(model, cache)).logits
        torch.testing.assert_close(first, whole[:, :40])
        rest = model(two[:, 40:], **with_cache(model, cache)).logits
        torch.testing.assert_close(rest, whole[:, 40:])
        handle.keep = 0.5
        cache.reset()
        model(two, **with_cache(model, cache))
        assert handle.report().layers[0].tokens_kept < 24


QWEN2_VL: dict[str, Any] = {
    "text_config": {
        **SHAPE,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
    },
    "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
}
GPT_OSS: dict[str, Any] = {
    **SHAPE,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "layer_types": ["full_attention"] * 2,
    "attn_implementation": "eager",
}


def _other(name: str, **fields: Any) -> nn.Module:
    """Build a model of transformers on its own configuration."""
    kind = getattr(transformers, name)
    return kind(kind.config_class(**fields))


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "GPT2LMHeadModel",
        {**SMALL, "n_head": 2},
        "expected a rotary embedding next to GPT2Attention, found none",
    ),
    ("MambaForCausalLM", SMALL, "found no attention layer that has one in MambaForCausalLM"),
    (
        "T5ForConditionalGeneration",
        {"d_model": 16, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 8},
        "expected a decoder, got T5ForConditionalGeneration",
    ),
    (
        "Qwen2VLForConditionalGeneration",
        QWEN2_VL,
        # the second by transformers before 5.18
        "expected positions of one axis, got Qwen2VL|unknown attention Qwen2VLAttention",
    ),
    ("GptOssForCausalLM", GPT_OSS, "expected attention without learned sinks, got GptOss"),
    (
        "PhiForCausalLM",
        {**SHAPE, "qk_layernorm": True},
        "unknown attention PhiAttention; expected one that projects.*its keys are other ones",
    ),
    (
        "DogeForCausalLM",  # takes every number of a mask but 0 for "masked"
        {**SHAPE, "num_key_value_heads": SHAPE["num_attention_heads"]},
        "unknown attention DogeAttention; .* it doesn't add the numbers of a mask to its logits",
    ),
    ("DogeForCausalLM", SHAPE, "unknown attention DogeAttention; .* it raised RuntimeError"),
    (
        "MistralForCausalLM",
        {**SHAPE, "sliding_window": 8},
        "expected layers that attend to all tokens, got sliding windows",
    ),
]
if hasattr(cache_utils, "LinearAttentionLayer"):  # older releases give Falcon its own cache
    sizes = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
    message = "only keys and values, got FalconH1ForCausalLM with a Li"
    REFUSED.append(("FalconH1ForCausalLM", {**SHAPE, **sizes}, message))


@pytest.mark.parametrize(
    ("build", "given", "message"),
    [
        *((partial(_other, name, **fields), (0.5,), said) for name, fields, said in REFUSED),
        (partial(nn.Linear, 2, 2), (0.5,), "expected a causal language model .*, got Linear"),
        (partial(tiny, "llama"), (0,), "keep: expected a share above 0 and at most 1, got 0"),
        (partial(tiny, "llama"), ("half",), "keep: expected a share above .*, got 'half'"),
        (partial(tiny, "llama"), (0.5, "snapkv"), "expected a function of a view, got str"),
    ],
)
def test_what_cannot_be_compressed_is_refused_in_one_line(
    build: Any, given: tuple[Any, ...], message: str
) -> None:
    with (
        pytest.raises((TypeError, ValueError), match=message) as error,
        compress_cache(build(), *given),
    ):
        pass
    assert "\n" not in str(error.value)


def test_gates_behind_queries_are_left_out_and_queries_of_another_kind_are_refused() -> None:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    kind = {
        "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 16,
    }
    model: Any = _other("Qwen3NextForCausalLM", **SHAPE, **experts, **kind)
    (layer,) = attention_layers(model)
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    plain = layer.module.q_proj(hidden).view(2, 5, 4, 16)[..., :8]
    torch.testing.assert_close(layer.project(hidden), layer.module.q_norm(plain).transpose(1, 2))
    layer.module.config.num_attention_heads = 8  # which its forward does not ask for
    with pytest.raises(
        ValueError, match=r"unknown attention Qwen3Next.*its queries are other ones"
    ):
        attention_layers(model)


def test_other_caches_and_kernels_are_refused() -> None:
    model, ids = tiny("llama"), prompt()
    offloaded = DynamicCache()
    offloaded.offloading = True  # which needs a device when it is made
    for cache, message in (
        (
            StaticCache(config=model.config, max_cache_len=64),
            "a DynamicCache of layers that cache only keys and values, got StaticCache with",
        ),
        (offloaded, r"one that stays on its device, got DynamicCache\(offloading=True\)"),
    ):
        with (
            compress_cache(model, 0.5),
            pytest.raises(ValueError, match=f"cache: expected {message}"),
        ):
            model(ids, **with_cache(model, cache))
    static = StaticCache(config=model.config, max_cache_len=64)
    with torch.no_grad(), compress_cache(model, 0.5) as handle:
        handle.keep = 1  # caches stay as they are, of any kind
        model(ids, **with_cache(model, static))
    flash = _other("LlamaForCausalLM", **SHAPE)
    flash.config._attn_implementation = "flash_attention_2"
    with (
        pytest.raises(ValueError, match="attn_implementation: expected sdpa or eager"),
        compress_cache(flash, 0.5),
    ):
        pass


@pytest.mark.parametrize(
    ("part", "way"),
    [
        ("", "wrapped"),
        ("model.layers.1", "wrapped"),
        ("model.layers.1.self_attn", "call"),
        ("", "forward"),
    ],
)
def test_compiled_models_are_refused(part: str, way: str) -> None:
    """A graph that was there before the block knows none of its hooks."""
    model = copy.deepcopy(tiny("llama"))
    model.model.layers[0].mlp.compile(backend="eager")  # next to attention it may be
    with compress_cache(model, 0.5):
        pass
    module = model.get_submodule(part)
    if way == "forward":
        module.forward = torch.compile(module.forward, backend="eager")
    elif way == "call":
        module.compile(backend="eager")
    elif part:
        model.set_submodule(part, torch.compile(module, backend="eager"))
    else:
        model = torch.compile(model, backend="eager")
    with (
        pytest.raises(ValueError, match="expected one that isn't compiled, got a compiled"),
        compress_cache(model, 0.5),
    ):
        pass


def test_a_score_of_ones_own_is_one_function_and_its_cache_is_for_the_block() -> None:
    model, ids, cache = tiny("llama"), prompt(120), DynamicCache()
    with compress_cache(model, 0.5, newest):
        generated(model, ids, **with_cache(model, cache))
    slots = cache.layers[0].slots[0, 0]
    assert slots.tolist() == [0, 1, 2, 3, *range(131 - len(slots), 127)]
    with pytest.raises(ValueError, match="cache: this cache was compressed by compress_cache"):
        model(ids[:, :1], **with_cache(model, cache))


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "kv-cache.md"
    ids = prompt(64)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    scope: dict[str, Any] = {"model": tiny("llama"), "inputs": inputs}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
        exec(compile(code, "kv-cache.md", "exec"), scope)
        assert scope["answer"].shape == (1, 128)
    assert "2 layers: 14 of 64 keys stay" in capsys.readouterr().out


def test_a_share_is_checked_when_it_is_set() -> None:
    model, ids = tiny("llama"), prompt()
    wrong: list[Any] = [-5, 0, float("nan"), 2, True, "x", None]
    with compress_cache(model, 0.5) as handle:
        for keep in wrong:
            with pytest.raises(ValueError, match="keep: expected a share above 0 and at most 1, g"):
                handle.keep = keep
        assert handle.keep == 0.5
        generated(model, ids)
        half = handle.report()
        handle.keep = 1
        generated(model, ids)
        assert handle.report() is half
        handle.keep = 0.25
        generated(model, ids)
        assert handle.report().bytes_after < half.bytes_after
    with compress_cache(model, 1) as handle:
        generated(model, ids)
        assert not handle.report().layers
        handle.keep = 0.5
        generated(model, ids)
        assert handle.report().layers
