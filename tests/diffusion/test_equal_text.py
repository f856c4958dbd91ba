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

from mame_sd import apply_mame, embedded_pipeline, remove_mame
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


def computed(handle: Any) -> set[float]:
    """Return how many text tokens the text's MLPs computed, by the report."""
    return {layer.tokens_kept for layer in handle.report().layers if layer.kind == "text"}


def both(model: Any, inputs: dict[str, Any], **setting: Any) -> tuple[Tensor, Tensor, set[float]]:
    """Return the outputs with and without equal text as one, and `computed`."""
    apply_mame(model, min_tokens=16, equal_text=False, **setting)
    usual = output(model, inputs)
    handle = apply_mame(model, min_tokens=16, **setting)
    return output(model, inputs), usual, computed(handle)


def keys_of_text(model: Any) -> set[int]:
    """Return a set that takes the number of text tokens that the first attention projects."""
    found: set[int] = set()
    projection = model.transformer_blocks[0].attn.add_k_proj
    projection.register_forward_pre_hook(lambda _, args: found.add(args[0].shape[1]))
    return found


@pytest.mark.filterwarnings("ignore:.*no layer merges")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_images_are_those_of_all_text_tokens(name: str, way: str) -> None:
    model, inputs = model_and_inputs(name)
    keys = keys_of_text(model)
    one, usual, count = both(model, inputs, **WAYS[way])
    length = inputs["encoder_hidden_states"].shape[1]
    left = way == "an unmerged layer"
    assert keys == ({length} if left else {length, length + 1 - EQUAL})
    assert count == {length + 1 - EQUAL}
    torch.testing.assert_close(one, usual, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_give_attention_all_keys_of_the_text(dtype: torch.dtype) -> None:
    model, inputs = model_and_inputs("SD 3", dtype)
    keys = keys_of_text(model)
    one, usual, _ = both(model, inputs, keep=0.5)
    assert keys == {inputs["encoder_hidden_states"].shape[1]}
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
    one, usual, _ = both(model, inputs, keep=keep)
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
    torch.testing.assert_close(one, all_text, rtol=1e-4, atol=1e-5)


ALL_TEXT: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any]]] = {
    "all but three differ": (lambda text: text[:, -EQUAL + 3 :].normal_(), {"keep": 0.5}),
    "one of the last in one sample": (lambda text: text[0, -5].add_(1), {"keep": 0.5}),
    "NaN": (lambda text: text[:, -1].fill_(torch.nan), {"keep": 0.5}),
    "the paper's method": (lambda text: None, {"tau": 0.5}),
}


@pytest.mark.parametrize(("unlike", "setting"), ALL_TEXT.values(), ids=ALL_TEXT)
def test_all_text_tokens_are_computed(
    unlike: Callable[[Tensor], Any], setting: dict[str, Any]
) -> None:
    model, inputs = model_and_inputs("SD 3")
    unlike(inputs["encoder_hidden_states"])
    keys = keys_of_text(model)
    handle = apply_mame(model, min_tokens=16, **setting)
    output(model, inputs)
    assert keys == {inputs["encoder_hidden_states"].shape[1]}
    assert computed(handle) == set()


def test_samples_with_other_numbers_of_equal_tokens() -> None:
    model, inputs = model_and_inputs("SD 3")
    text = inputs["encoder_hidden_states"]
    text[1, 1 - EQUAL] += 1  # the last EQUAL - 2 tokens of this sample are equal
    keys = keys_of_text(model)
    one, usual, _ = both(model, inputs, keep=0.5)
    assert keys == {text.shape[1], text.shape[1] + 3 - EQUAL}
    torch.testing.assert_close(one, usual, rtol=1e-4, atol=1e-5)


def test_gradients_reach_all_text_tokens() -> None:
    model, inputs = model_and_inputs("SD 3")
    text = inputs["encoder_hidden_states"].requires_grad_()
    apply_mame(model, keep=0.5, min_tokens=16)
    model(**inputs, return_dict=False)[0].square().sum().backward()
    assert (text.grad[:, -EQUAL:].abs().sum(-1) > 0).all()


def test_compiled_blocks_compute_all_text_tokens() -> None:
    model, inputs = model_and_inputs("SD 3")
    handle = apply_mame(model, keep=0.5, min_tokens=16)
    usual = output(model, inputs)
    handle.reset()
    torch._dynamo.reset()
    for block in model.transformer_blocks:
        block.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(output(model, inputs), usual, rtol=1e-4, atol=1e-5)
    assert computed(handle) == set()


def add_positions(module: Any, args: tuple[Any, ...], y: Tensor) -> Tensor:
    """Return an output [B, N, C] with something else added to each token."""
    return y + torch.linspace(0, 1, y.shape[1]).view(1, -1, 1)


def pool_text(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> Any:
    """Return a block's output with the mean of the text added."""
    return y[0] + kwargs["encoder_hidden_states"].mean(), y[1] + y[0].mean()


def wrap(module: Any) -> None:
    """Replace the forward of an attention by one that reads the text."""
    inner = module.forward

    def forward(hidden_states: Tensor, encoder_hidden_states: Tensor, **kwargs: Any) -> Any:
        mean = encoder_hidden_states.mean(1, keepdim=True)
        return inner(hidden_states + mean, encoder_hidden_states, **kwargs)

    module.forward = forward


def compile_part(parent: Any, name: str) -> None:
    """Put a compiled module in the place of a part."""
    setattr(parent, name, torch.compile(getattr(parent, name), backend="eager"))


# Changes of a model and of its first block, as users and tools make them.
CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "positions": lambda model, _: model.context_embedder.register_forward_hook(add_positions),
    "a hook on a block": lambda _, block: block.register_forward_hook(pool_text, with_kwargs=True),
    "a wrapped attention": lambda _, block: wrap(block.attn),
    "a wrapped block": lambda model, _: compile_part(model.transformer_blocks, "0"),
    "compiled": lambda _, block: compile_part(block, "attn"),
}


@pytest.mark.filterwarnings("ignore:.*no layer merges")
@pytest.mark.parametrize("first", ["change", "apply_mame"])
@pytest.mark.parametrize("where", CHANGES)
def test_others_see_all_text_tokens(where: str, first: str) -> None:
    model, inputs = model_and_inputs("SD 3")
    torch._dynamo.reset()
    block = model.transformer_blocks[0]
    if first == "change":
        CHANGES[where](model, block)
    apply_mame(model, keep=1, min_tokens=16)
    if first != "change":
        CHANGES[where](model, block)
    one = output(model, inputs)
    remove_mame(model)
    torch.testing.assert_close(one, output(model, inputs), rtol=1e-4, atol=1e-5)


def test_settings_of_a_layer_may_compute_all_text_tokens() -> None:
    model, inputs = model_and_inputs("SD 3")
    keys = keys_of_text(model)
    apply_mame(model, keep=0.5, min_tokens=16, layers={"*.0.attn": {"equal_text": False}})
    output(model, inputs)
    assert keys == {inputs["encoder_hidden_states"].shape[1]}


@torch.no_grad()
def test_a_block_called_with_another_image_gets_all_text_tokens() -> None:
    model, inputs = model_and_inputs("SD 3")
    block, width = model.transformer_blocks[0], model.inner_dim
    call = torch.randn(2, 50, width), torch.full((2, 20, width), 0.5), torch.randn(2, width)
    usual = block(*call)
    apply_mame(model, keep=1, min_tokens=16)
    output(model, inputs)
    for found, expected in zip(block(*call), usual, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_kernel_is_not_used_where_nothing_merges() -> None:
    model, inputs = model_and_inputs("SD 3")
    kernel = mock.Mock(wraps=F.scaled_dot_product_attention)
    usual = output(model, inputs)

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None) -> Tensor:
        result: Tensor = kernel(query, key, value, attn_mask)
        return result

    apply_mame(model, keep=1, min_tokens=16, kernel=attend)
    torch.testing.assert_close(output(model, inputs), usual, rtol=1e-4, atol=1e-5)
    assert not kernel.called


@pytest.mark.parametrize("equal_text", [True, False])
def test_autocast(equal_text: bool) -> None:
    model, inputs = model_and_inputs("SD 3.5")  # its norms return fp32
    usual = output(model, inputs)
    apply_mame(model, keep=0.9, min_tokens=16, equal_text=equal_text)
    with torch.autocast("cpu", torch.bfloat16):
        merged = output(model, inputs)
    assert (merged - usual).norm() < 0.05 * usual.norm()


@pytest.mark.filterwarnings("ignore:.*no layer merges")
def test_a_pipeline_without_t5_says_so_and_is_itself_again_when_removed() -> None:
    pipe = embedded_pipeline("transformer")

    def made() -> Tensor:
        seed = torch.Generator().manual_seed(0)
        images: Tensor = pipe(
            "a red key", num_inference_steps=1, generator=seed, output_type="pt"
        ).images
        return images

    plain = made()
    handle = apply_mame(pipe, keep=1)
    found = made()
    assert (found - plain).abs().max() < 1e-3
    assert "MLPs of text, level 1: 276 -> 21 tokens (8%), 5 of 5 layers" in str(handle.report())
    assert "256 equal tokens computed as one" in str(handle.report())
    handle.remove()
    assert torch.equal(made(), plain)


def test_rivals_give_attention_all_text_tokens() -> None:
    model, inputs = model_and_inputs("SD 3")
    keys = keys_of_text(model)
    rival: Any = chosen_rows("random-0.25")[1].method
    with replace(rival, min_tokens=16).on(model) as handle:
        output(model, inputs)
        assert handle.report().levels()[0].layers_merged
    assert keys == {inputs["encoder_hidden_states"].shape[1]}
