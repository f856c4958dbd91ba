"""Equal text tokens at the end of a prompt are computed as one, and change nothing but rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import JointAttnProcessor2_0
from torch import Tensor

from mame_sd import apply_mame, embedded_pipeline
from mame_sd.eval.benchmark.rows import chosen_rows
from tests.matrix.models.registry import MODELS
from tests.matrix.transformers import SD35

EQUAL = 20  # equal tokens at the end of the text
# SD 3.5 has a second attention over the image alone.
CASES = {"SD 3": MODELS["SD3Transformer2DModel"], "SD 3.5": SD35}
WAYS: dict[str, dict[str, Any]] = {
    "nothing merges": {"keep": 1},
    "merged keys": {"keep": 0.5},
    "a restored block": {"keep": 0.5, "block_keep": 0.5},
    "an unmerged layer": {"keep": 0.5, "layers": {"transformer_blocks.0.attn": False}},
    "few queries": {"keep": 0.5, "fit_queries": 0},
}


def model_and_inputs(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    """Return a model, and inputs whose text ends in `EQUAL` equal tokens."""
    case = CASES[name]
    model, inputs = case.build().to(dtype), case.inputs()
    text = inputs["encoder_hidden_states"]
    inputs["encoder_hidden_states"] = F.pad(text, (0, 0, 0, EQUAL), value=0.5)
    return model, {k: t.to(dtype) if t.is_floating_point() else t for k, t in inputs.items()}


@torch.no_grad()
def output(model: Any, inputs: dict[str, Any]) -> Tensor:
    result: Tensor = model(**inputs, return_dict=False)[0]
    return result


def both(model: Any, inputs: dict[str, Any], **setting: Any) -> tuple[Tensor, Tensor, int]:
    """Return the outputs with and without equal text as one, and how many tokens were."""
    apply_mame(model, min_tokens=16, equal_text=False, **setting)
    usual = output(model, inputs)
    handle = apply_mame(model, min_tokens=16, **setting)
    return output(model, inputs), usual, handle.report().equal_text


def lengths_of_text(model: Any) -> list[int]:
    """Return a list that takes the number of text tokens of each call of the first block."""
    found: list[int] = []
    model.transformer_blocks[0].register_forward_pre_hook(
        lambda block, args, kwargs: found.append(kwargs["encoder_hidden_states"].shape[1]),
        with_kwargs=True,
    )
    return found


@pytest.mark.filterwarnings("ignore:.*no layer merges")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_images_are_those_of_all_text_tokens(name: str, way: str) -> None:
    model, inputs = model_and_inputs(name)
    lengths = lengths_of_text(model)
    one, usual, count = both(model, inputs, **WAYS[way])
    length = inputs["encoder_hidden_states"].shape[1]
    assert lengths == [length, length + 1 - EQUAL]
    assert count == EQUAL
    torch.testing.assert_close(one, usual, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_give_attention_all_keys_of_the_text(dtype: torch.dtype) -> None:
    model, inputs = model_and_inputs("SD 3", dtype)
    one, usual, count = both(model, inputs, keep=0.5)
    assert count == EQUAL
    error = (one - usual).norm() / usual.norm()
    assert error < (1e-10 if dtype == torch.float64 else 0.02)


class OwnProcessor(JointAttnProcessor2_0):
    """A processor that may read the text."""

    seen: list[int]

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(kwargs["encoder_hidden_states"].shape[1])
        return super().__call__(attn, hidden_states, *args, **kwargs)


@pytest.mark.filterwarnings("ignore:.*no layer merges")
@pytest.mark.parametrize("keep", [0.5, 1])
def test_a_processor_of_the_users_gets_all_text_tokens(keep: float) -> None:
    model, inputs = model_and_inputs("SD 3")
    processor = OwnProcessor()
    processor.seen = []
    model.set_attn_processor(processor)
    one, usual, count = both(model, inputs, keep=keep)
    assert count == EQUAL
    assert set(processor.seen) == {inputs["encoder_hidden_states"].shape[1]}
    torch.testing.assert_close(one, usual, rtol=1e-4, atol=1e-5)


def test_a_kernel_in_place_of_pytorchs_gets_all_keys_of_the_text() -> None:
    model, inputs = model_and_inputs("SD 3")
    usual, keys = F.scaled_dot_product_attention, []

    def kernel(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        keys.append(key.shape[2])
        return usual(query, key, value, **kwargs)

    with mock.patch.object(F, "scaled_dot_product_attention", kernel):
        one, all_text, _ = both(model, inputs, keep=0.5)
    assert set(keys) == {96 // 2 + inputs["encoder_hidden_states"].shape[1]}
    # Sizes are put into keys by the mean of the queries, of which equal ones are one.
    assert (one - all_text).norm() < 0.01 * all_text.norm()


@pytest.mark.parametrize(
    "unlike",
    [
        lambda text: text[:, -EQUAL + 3 :].normal_(),
        lambda text: text[0, -5].add_(1),
        lambda text: text[:, -1].fill_(torch.nan),
    ],
    ids=["all but three", "one of the last in one sample", "NaN"],
)
def test_text_that_differs_stays(unlike: Callable[[Tensor], Any]) -> None:
    model, inputs = model_and_inputs("SD 3")
    unlike(inputs["encoder_hidden_states"])
    lengths = lengths_of_text(model)
    handle = apply_mame(model, keep=0.5, min_tokens=16)
    output(model, inputs)
    assert lengths == [inputs["encoder_hidden_states"].shape[1]]
    assert handle.report().equal_text == 0


def test_gradients_reach_all_text_tokens() -> None:
    model, inputs = model_and_inputs("SD 3")
    text = inputs["encoder_hidden_states"].requires_grad_()
    apply_mame(model, keep=0.5, min_tokens=16)
    model(**inputs, return_dict=False)[0].square().sum().backward()
    assert (text.grad[:, -EQUAL:].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("by_place", [0, 2, 4])
def test_arguments_by_position(by_place: int) -> None:
    model, inputs = model_and_inputs("SD 3")
    names = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep")[:by_place]
    handle = apply_mame(model, keep=0.5, min_tokens=16)
    named = {name: value for name, value in inputs.items() if name not in names}
    with torch.no_grad():
        one = model(*(inputs[name] for name in names), **named, return_dict=False)[0]
    assert handle.report().equal_text == EQUAL
    assert torch.equal(one, output(model, inputs))


def test_paper_s_method_keeps_all_text_tokens() -> None:
    model, inputs = model_and_inputs("SD 3")
    handle = apply_mame(model, tau=0.5, min_tokens=16)
    output(model, inputs)
    assert handle.report().equal_text == 0


def test_compiled_blocks_count_equal_text() -> None:
    model, inputs = model_and_inputs("SD 3")
    handle = apply_mame(model, keep=0.5, min_tokens=16)
    usual = output(model, inputs)
    torch._dynamo.reset()
    for block in model.transformer_blocks:
        block.compile(backend="eager")
    torch.testing.assert_close(output(model, inputs), usual, rtol=1e-4, atol=1e-5)
    assert handle.report().equal_text == EQUAL


@pytest.mark.filterwarnings("ignore:.*no layer merges")
def test_a_pipeline_without_t5_says_so_and_is_itself_again_when_removed() -> None:
    pipe = embedded_pipeline("transformer")

    def made() -> Tensor:
        seed = torch.Generator().manual_seed(0)
        result: Tensor = pipe("a red key", num_inference_steps=1, generator=seed, output_type="pt")
        return result.images

    plain = made()
    handle = apply_mame(pipe, keep=1)
    found = made()
    assert (found - plain).abs().max() < 1e-3
    assert "text: 256 equal tokens computed as one" in str(handle.report())
    assert handle.report().to_dict()["equal_text"] == 256
    handle.remove()
    assert torch.equal(made(), plain)


def test_rivals_compute_all_text_tokens() -> None:
    model, inputs = model_and_inputs("SD 3")
    lengths = lengths_of_text(model)
    rival: Any = chosen_rows("random-0.25")[1].method
    with replace(rival, min_tokens=16).on(model) as handle:
        output(model, inputs)
        assert handle.report().levels()[0].layers_merged
    assert lengths == [inputs["encoder_hidden_states"].shape[1]]
