"""Merging on a model: batches, restoring, compiling, models of one's own, refusals."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from mame_sd.perception.apply_encoder import apply_encoder, has_encoder_hooks, remove_encoder
from mame_sd.perception.encoder_registry import Encoder, is_encoder, register_encoder
from tests.builders.perception import DEPTH, NAMED, PATCH, PATCHES, TIMM, VIT, Row, tokens
from tests.builders.timm_models import NEEDS_TIMM
from tests.builders.tiny import tiny_unet
from tests.perception.oracle import blocks_of


@torch.no_grad()
def test_few_tokens_are_left_alone() -> None:
    model = VIT.build()
    handle = apply_encoder(model)
    model(torch.randn(1, 3, PATCH, PATCH), interpolate_pos_encoding=True)
    assert tokens(handle) == [2] * DEPTH
    notes = [block.note for block in handle.report().layers]
    assert notes == ["", *["fewer than 2 patches"] * (DEPTH - 1)]


@torch.no_grad()
def test_by_tau_a_batch_keeps_what_any_image_keeps_and_the_report_says_so() -> None:
    """The paper's rule (Algorithm 1), which the float64 loops of test_models hold to the digit."""
    model, inputs, kept = VIT.build(), VIT.batch(3), []
    handle = apply_encoder(model, blocks=1, tau=0.35)
    for own in (*(inputs["pixel_values"].split(1)), inputs["pixel_values"]):
        handle.reset()
        VIT.call(model, {"pixel_values": own})
        kept.append(tokens(handle)[0])
        note = "by tau in a batch of 3: a token stays where any image keeps it"
        assert handle.report().layers[0].note == note * (len(own) == 3)
    assert max(kept[:3]) < kept[3] < PATCHES + 1


@NEEDS_TIMM
@pytest.mark.compiles
@torch.no_grad()
def test_tau_compiles_around_merging() -> None:
    torch._dynamo.reset()
    row = TIMM[0].values[0]  # traced faster than those of transformers
    model = row.build()
    model.blocks = model.blocks[:2]
    handle = apply_encoder(model, tau=0.3, blocks=1, prop_attn=True)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    counts = []
    for seed in range(4):
        inputs = row.batch(seed=seed)
        handle.reset()
        torch.testing.assert_close(row.call(compiled, inputs), row.call(model, inputs))
        counts.append((len(graphs), *tokens(handle)))
    assert len({kept for _, kept, *_ in counts}) > 2
    assert counts[2][0] == counts[-1][0]  # other numbers of tokens compile nothing more


@pytest.mark.parametrize("row", TIMM[:1])
def test_timm_gives_features_directly_and_checkpoints_around_blocks_are_refused(row: Row) -> None:
    model, image = row.build(), row.batch()["pixel_values"]
    apply_encoder(model, keep=(0.5, 0.5), blocks=(0, 2))
    assert model.forward_features(image).shape[1] == 1 + 9
    model.set_grad_checkpointing(True)
    assert model(image).isfinite().all()
    with pytest.raises(ValueError, match=r"expected no checkpointing around blocks \(timm"):
        model.train()(image)


def test_what_has_no_tokens_that_can_merge_is_refused_with_a_reason() -> None:
    both = nn.ModuleList([VIT.build(), VIT.build()])
    with torch.device("meta"):
        swin, mae = (
            kind(kind.config_class())
            for kind in (transformers.SwinForImageClassification, transformers.ViTMAEForPreTraining)
        )
    for model, known, message in (
        (swin, True, "SwinModel: its attention works in windows"),
        (mae, True, "its decoder needs every token; apply to its encoder, model.vit,"),
        (both, True, r"got 0.vit \(ViTModel\), 1.vit \(ViTModel\)"),
        (nn.Linear(2, 2), False, r"one vision transformer \(.*ViTModel.*\), got Linear; give the"),
    ):
        assert is_encoder(model) == known
        with pytest.raises(ValueError, match=message):
            apply_encoder(model, tau=0.8)
        assert not has_encoder_hooks(model)
    assert not is_encoder(tiny_unet())
    assert not is_encoder("facebook/deit-base-patch16-224")


def test_blocks_that_another_tool_has_wrapped_are_refused() -> None:
    model = VIT.build()
    block = blocks_of(model, VIT)[1]
    block.forward = block.forward  # nobody's: transformers 5.0 leaves it there
    apply_encoder(model)
    remove_encoder(model)
    block.forward = partial(block.forward)
    with pytest.raises(
        ValueError, match="expected a ViTLayer with its own forward, found another tool's"
    ):
        apply_encoder(model, keep=0.5)
    assert not has_encoder_hooks(model)


def test_masks_are_refused() -> None:
    siglip = NAMED["Siglip2ForImageClassification"]
    padded = {"pixel_attention_mask": torch.ones(2, PATCHES).tril()}
    asked = [(siglip, padded, r"pixel_attention_mask: expected none|without an attention mask")]
    if "attention_mask" in inspect.signature(transformers.ViTModel.forward).parameters:
        mask = torch.ones(2, PATCHES + 1)  # transformers before 5.9 drops it itself
        mask[0, 5] = 0
        asked.append((VIT, {"attention_mask": mask}, "expected images without an attention mask"))
    for row, given, message in asked:
        model = row.build()
        apply_encoder(model, keep=0.5)
        with pytest.raises(ValueError, match=message):
            model(**{**row.batch(), **given})


def test_a_block_without_its_projection_to_keys_is_refused() -> None:
    row = NAMED["Dinov2ForImageClassification"]
    model = row.build()
    attention = blocks_of(model, row)[1].attention
    inner = getattr(attention, "attention", attention)  # before transformers 5.18
    inner.mine = inner._modules.pop("k_proj" if inner is attention else "key")
    with pytest.raises(ValueError, match=r"it has no attention\.k_proj"):
        apply_encoder(model, keep=0.5)


class MyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_a, self.norm_b = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attend, self.mlp = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_a(x))
        return x + self.mlp(self.norm_b(x))


class MyViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(MyBlock() for _ in range(5)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


@torch.no_grad()
def test_a_model_of_one_s_own() -> None:
    model, x = MyViT(), torch.randn(2, 9, 8)
    assert not is_encoder(nn.Sequential(MyBlock()))
    attention, mlp = ("norm_a", "attend"), ("norm_b", "mlp")
    register_encoder(Encoder("mine", ("MyViT",), "MyBlock", attention, mlp, num_prefix_tokens=1))
    assert is_encoder(model)
    handle = apply_encoder(model, keep=[0.5] * 5, blocks=5)
    assert model(x).shape == (2, 1 + 1, 8)
    assert not handle.prop_attn, "its description does not say that attention adds a mask"
    assert tokens(handle) == [5, 3, 2, 2, 2]
    assert "blocks.1" in str(handle.report())
    with pytest.raises(
        ValueError,
        match="prop_attn: expected attention that takes an argument 'attention_mask', which Lin",
    ):
        apply_encoder(model, keep=0.5, prop_attn=True)
    model.blocks[1].bias = nn.Parameter(torch.zeros(8))
    with pytest.raises(
        ValueError,
        match=r"expected a MyViT with blocks .* got another kind .MyBlock: it also has bias",
    ):
        apply_encoder(model, keep=0.5)
