"""Test MaMeAttnProcessor: what merges, what passes through, and that it delegates attention."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
from diffusers.models import attention_processor as processors
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
    SlicedAttnProcessor,
)

import mame_sd
from mame_sd import MaMeAttnProcessor, MaMeConfig, NothingMergedError
from tests import oracle
from tests.builders.layers import attention, tokens


def with_processor(attn: Attention, **fields: Any) -> MaMeAttnProcessor:
    processor = MaMeAttnProcessor(min_tokens=16, **fields)
    attn.set_processor(processor)
    return processor


@torch.no_grad()
def test_the_paper_s_line_is_the_paper() -> None:
    """`MaMeAttnProcessor(tau=0.8)` is Algorithms 1 and 2 around the attention, to 1e-12."""
    attn = attention().double()
    x = tokens(3, 40).double()
    x[:, 1::3] = x[:, :1] + 0.3 * x[:, 1::3]  # some are alike
    plan = oracle.token_plan(x, 0.8)
    assert 0 < len(plan.preserved) < 20
    expected = plan.restore(AttnProcessor2_0()(attn, plan.merge(x)))
    attn.set_processor(MaMeAttnProcessor(tau=0.8, min_tokens=1))
    torch.testing.assert_close(attn(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("inner", "scaled"),
    [(AttnProcessor(), False), (SlicedAttnProcessor(1), True), (AttnProcessor2_0(), True)],
)
def test_keep_is_attention_over_merged_keys_whatever_computes_it(inner: Any, scaled: bool) -> None:
    attn, x = attention(scale_qk=scaled), tokens()
    processor = with_processor(attn, keep=0.25, inner=inner)
    q, k, v = (
        to(x).unflatten(-1, (2, 8)).transpose(1, 2) for to in (attn.to_q, attn.to_k, attn.to_v)
    )
    scale = None if scaled else 1.0
    merged = mame_sd.attention(q, k, v, (8, 8), scale=scale)
    expected = attn.to_out[0](merged.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attn(x), expected)
    assert processor.report().layers[0].tokens_kept == 16


UNTOUCHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cross-attention": ({"cross_attention_dim": 16}, {"encoder_hidden_states": tokens(length=64)}),
    "encoder states": ({}, {"encoder_hidden_states": tokens(length=64)}),
    "mask": ({}, {"attention_mask": torch.zeros(2, 1, 64)}),
    "group norm": ({"norm_num_groups": 4}, {}),
    "residual": ({"residual_connection": True}, {}),
}


@pytest.mark.parametrize(("module", "call"), UNTOUCHED.values(), ids=UNTOUCHED.keys())
def test_passes_through_bit_equal(module: dict[str, Any], call: dict[str, Any]) -> None:
    attn, x = attention(**module), tokens()
    before = attn(x, **call)
    with_processor(attn, keep=0.3)
    assert torch.equal(attn(x, **call), before)


def test_an_inner_processor_is_an_object_that_can_be_called() -> None:
    with pytest.raises(TypeError, match="inner: expected an attention processor, got"):
        MaMeAttnProcessor(inner=AttnProcessor2_0)


def test_names_every_keyword_that_diffusers_processors_take() -> None:
    # Attention.forward passes only what the processor's signature names. An argument that is not
    # there would be dropped without a message.
    ours = set(inspect.signature(MaMeAttnProcessor.__call__).parameters)
    theirs: set[str] = set()
    for name, kind in vars(processors).items():
        if (
            inspect.isclass(kind)
            and name.endswith(("Processor", "Processor2_0"))
            and "__call__" in vars(kind)
        ):
            theirs |= set(inspect.signature(kind.__call__).parameters)
    assert len(theirs) > 10
    # `scale` is gone, and a mask of the encoder is for Mochi's own class.
    assert theirs - ours <= {"scale", "args", "kwargs", "encoder_attention_mask"}


def test_rotary_positions_pass_through() -> None:
    class Rotary:
        def __call__(
            self, attn: Any, hidden_states: torch.Tensor, image_rotary_emb: Any, **_: Any
        ) -> torch.Tensor:
            return hidden_states * image_rotary_emb

    attn, x = attention(), tokens()
    attn.set_processor(MaMeAttnProcessor(inner=Rotary(), min_tokens=1, keep=0.3))
    angles = torch.randn(64, 1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(attn(x, image_rotary_emb=angles), x * angles)


@pytest.mark.parametrize(
    ("size", "length", "expected"),
    [
        ((8, 24), 48, (4, 12)),
        ((15, 9), 12, (4, 3)),
        (None, 144, (12, 12)),
    ],
    ids=["a level", "odd sides", "square"],
)
def test_size_of_a_level(size: Any, length: int, expected: tuple[int, int]) -> None:
    attn, x = attention(), tokens(length=length)
    processor = MaMeAttnProcessor(min_tokens=1, keep=0.25, size=size)
    attn.set_processor(processor)
    got = attn(x)
    assert processor.report().layers[0].size == expected
    hooked = attention()
    hooked.set_processor(MaMeAttnProcessor(min_tokens=1, keep=0.25, size=expected))
    assert torch.equal(hooked(x), got)


def test_tokens_of_no_level_pass_through() -> None:
    attn, x = attention(), tokens(length=64)
    before = attn(x)
    processor = with_processor(attn, keep=0.3, size=(8, 24))
    assert torch.equal(attn(x), before)
    with pytest.raises(NothingMergedError, match=r"64 tokens are no level of size=\(8, 24\)"):
        processor.report()


def test_unknown_size_merges_along_the_sequence_warns_once_and_says_so() -> None:
    attn, x = attention(), tokens(length=192)
    processor = with_processor(attn, keep=0.25)
    with pytest.warns(UserWarning, match="height and width unknown.*apply_mame"):
        attn(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attn(x)
        assert "along the sequence" in str(processor.report())
        with_processor(attn, tau=0.3)  # the paper's partition needs no size
        assert attn(x).shape == (2, 192, 16)


def test_report_raises_when_no_call_was_self_attention_over_tokens() -> None:
    attn, cross = attention(), attention(cross_attention_dim=16)
    processor = with_processor(attn, keep=0.5)
    cross.set_processor(processor)
    attn(tokens().transpose(1, 2).reshape(2, 16, 8, 8))
    with pytest.raises(NothingMergedError, match=r"input of 4 dimensions \(1 calls\)"):
        processor.report()
    cross(tokens(), encoder_hidden_states=tokens())
    with pytest.raises(NothingMergedError, match=r"cross-attention \(1 calls\), input of 4"):
        processor.report()
    assert copy.deepcopy(processor).report().layers == ()
    attn(tokens())
    assert [layer.merged for layer in processor.report().layers] == [True]
    processor.reset()
    assert processor.report().layers == ()


def test_lost_ip_adapter_is_an_error() -> None:
    attn = attention(cross_attention_dim=16)
    with_processor(attn)
    with pytest.raises(ValueError, match="IP-Adapter"):
        attn(tokens(), encoder_hidden_states=(tokens(), [tokens()]))


def test_is_built_without_arguments_copied_and_pickled() -> None:
    assert MaMeAttnProcessor().config == MaMeConfig()
    attn = attention()
    processor = with_processor(attn, keep=0.5)
    attn(tokens())
    for twin in (copy.deepcopy(processor), pickle.loads(pickle.dumps(processor))):
        assert twin.config == processor.config
        assert twin.report().layers == ()
    assert len(processor.report().layers) == 1
    assert repr(processor) == "MaMeAttnProcessor(keep=0.5, min_tokens=16)"
