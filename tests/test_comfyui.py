"""The ComfyUI node, driven by ComfyUI's documented patch interface around real attention, against `apply_mame`."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor

from mame_sd import apply_mame
from mame_sd.config import MaMeConfig
from tests.builders.tiny import seeded

ROOT = Path(__file__).parents[1]
H, W = 8, 12


@pytest.fixture(scope="module")
def node() -> ModuleType:
    """The folder, loaded as ComfyUI loads custom nodes: by path, under a name that is not its own."""
    name = "custom_nodes_mame_sd"
    spec = importlib.util.spec_from_file_location(
        name, ROOT / "comfyui" / "__init__.py", submodule_search_locations=[str(ROOT / "comfyui")]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Model:
    """The part of ComfyUI's ModelPatcher that the node uses, with its options' layout: clones share no list of patches."""

    def __init__(self, block: BasicTransformerBlock) -> None:
        self.block = block
        self.model_options: dict[str, Any] = {"transformer_options": {"patches": {}}}

    def clone(self) -> Model:
        twin = Model(self.block)
        twin.model_options = copy.deepcopy(self.model_options)
        return twin

    def set_model_patch(self, patch: Any, name: str) -> None:
        patches = self.model_options["transformer_options"]["patches"]
        patches[name] = [*patches.get(name, []), patch]

    def set_model_attn1_patch(self, patch: Any) -> None:
        self.set_model_patch(patch, "attn1_patch")

    def set_model_attn1_output_patch(self, patch: Any) -> None:
        self.set_model_patch(patch, "attn1_output_patch")

    def self_attention(self, n: Tensor, size: tuple[int, int] = (H, W), context: Tensor | None = None) -> Tensor:
        """n [B, L, C] through the block's attn1, in the order in which ComfyUI's BasicTransformerBlock calls patches."""
        patches = self.model_options["transformer_options"]["patches"]
        options = {"original_shape": [n.shape[0], 4, *size], "block": ("input", 1), "block_index": 0}
        value = None
        if patches.get("attn1_patch"):
            context = n if context is None else context
            value = context
            for patch in patches["attn1_patch"]:
                n, context, value = patch(n, context, value, options)
        attn: Any = self.block.attn1
        context = n if context is None else context
        value = context if value is None else value
        q, k, v = attn.to_q(n), attn.to_k(context), attn.to_v(value)
        q, k, v = (t.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for t in (q, k, v))
        n = attn.to_out[0](torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        for patch in patches.get("attn1_output_patch", []):
            n = patch(n, options)
        return n


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(
        seeded(BasicTransformerBlock, 0, dim=16, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16)
    )


def tokens(length: int = H * W, seed: int = 1) -> Tensor:
    return torch.randn(2, length, 16, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("merge", ["keys and values", "queries too"])
@pytest.mark.parametrize(("by", "amount"), [("keep", 0.5), ("tau", 0.1)])
def test_node_is_apply_mame(node: ModuleType, model: Model, by: str, amount: float, merge: str) -> None:
    before = model.self_attention(tokens())
    (patched,) = node.NODE_CLASS_MAPPINGS["MaMeModelPatch"]().patch(model, by, amount, merge, 16)
    got = patched.self_attention(tokens())
    assert not torch.equal(got, before)
    attn = copy.deepcopy(model.block.attn1)
    apply_mame(attn, **{by: amount}, merge="kv" if merge == "keys and values" else "qkv", min_tokens=16, size=(H, W))
    torch.testing.assert_close(got, attn(tokens()))
    assert torch.equal(model.self_attention(tokens()), before)  # the model that came is left as it is


@torch.no_grad()
def test_what_cannot_merge_passes(node: ModuleType, model: Model, caplog: pytest.LogCaptureFixture) -> None:
    (patched,) = node.NODE_CLASS_MAPPINGS["MaMeModelPatch"]().patch(model, "keep", 0.5, "queries too", 16)
    with caplog.at_level("INFO", logger="mame-sd"):
        for length, context in ((12, None), (50, None), (H * W, tokens(7))):  # small, over frames, not self-attention
            n = tokens(length)
            assert torch.equal(patched.self_attention(n, context=context), model.self_attention(n, context=context))
        for _ in range(2):
            patched.self_attention(tokens())
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "MaMe: 12 tokens left alone",
        "MaMe: 50 tokens left alone",
        "MaMe: 96 tokens left alone",
        "MaMe: 96 -> 48 tokens at 8 x 12",
    ]


@torch.no_grad()
def test_nothing_above_tau_is_the_unpatched_model(node: ModuleType, model: Model) -> None:
    (patched,) = node.NODE_CLASS_MAPPINGS["MaMeModelPatch"]().patch(model, "tau", 1.0, "queries too", 16)
    torch.testing.assert_close(patched.self_attention(tokens()), model.self_attention(tokens()))


@torch.no_grad()
def test_a_lower_level_of_an_odd_latent(node: ModuleType, model: Model) -> None:
    (patched,) = node.NODE_CLASS_MAPPINGS["MaMeModelPatch"]().patch(model, "keep", 0.5, "keys and values", 16)
    attn = copy.deepcopy(model.block.attn1)
    apply_mame(attn, keep=0.5, merge="kv", min_tokens=16, size=(5, 8))
    torch.testing.assert_close(patched.self_attention(tokens(40), size=(9, 15)), attn(tokens(40)))


def test_bad_amounts_say_what_was_expected(node: ModuleType, model: Model) -> None:
    with pytest.raises(ValueError, match="keep: expected a share above 0"):
        node.NODE_CLASS_MAPPINGS["MaMeModelPatch"]().patch(model, "keep", -0.5, "keys and values", 16)


def test_inputs_are_what_comfyui_reads(node: ModuleType) -> None:
    kind = node.NODE_CLASS_MAPPINGS["MaMeModelPatch"]
    inputs = kind.INPUT_TYPES()["required"]
    assert inputs["model"] == ("MODEL",)
    assert inputs["amount"][1]["default"] == MaMeConfig().keep
    assert callable(getattr(kind, kind.FUNCTION))
    assert kind.RETURN_TYPES == ("MODEL",)
    assert set(node.NODE_DISPLAY_NAME_MAPPINGS) == set(node.NODE_CLASS_MAPPINGS)
