"""Test attention families: each merged call equals merging by hand, in users' own models too."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import (
    Attention,
    HunyuanAttnProcessor2_0,
    JointAttnProcessor2_0,
    PAGCFGHunyuanAttnProcessor2_0,
)
from diffusers.models.transformers.transformer_flux import FluxAttention
from torch import Tensor, nn

from mame_sd import MaMeConfig, apply_mame, plan_tokens, remove_mame
from mame_sd.diffusion.families.attention import SequenceAttention
from mame_sd.diffusion.families.layouts import packed
from mame_sd.diffusion.families.transformers import ADDED_KEYS, BUILT_IN, IMAGE_ALONE
from mame_sd.diffusion.layer import NO_SIZE, LayerStats, merged_call
from mame_sd.families import Family, Tokens, along, pixels, register_family
from tests.builders.tiny import seeded
from tests.builders.transformers import TEXT, H, W, normal, run
from tests.matrix.models.case import BLC, case
from tests.matrix.models.images import HALF as HALF_WAY

N = H * W
SIZE = {"query_dim": 32, "heads": 2, "dim_head": 16}
TAU = MaMeConfig(tau=0.35, min_tokens=1)
HALF = MaMeConfig(keep=0.5, min_tokens=1)


def built_in(name: str) -> Family:
    return next(family for family in BUILT_IN if family.name.startswith(name))


def counted(
    module: nn.Module, family: Family, tokens: Tokens, config: MaMeConfig, **call: Any
) -> tuple[Any, LayerStats]:
    layer, stats = SequenceAttention(module, family), LayerStats("here")
    given = layer.call(module, module.forward, (), call)
    return merged_call(layer, given, tokens, config, stats), stats


def merged(module: nn.Module, family: Family, tokens: Tokens, **call: Any) -> Any:
    """Return the module's output under the paper's method."""
    output, stats = counted(module, family, tokens, TAU, **call)
    assert stats.last_reason is None
    return output


@torch.no_grad()
@pytest.mark.parametrize("config", [TAU, HALF])
def test_a_mask_is_left_alone_where_the_family_knows_none(config: MaMeConfig) -> None:
    attn = seeded(Attention, 0, query_dim=32, heads=2, dim_head=16)
    mask = torch.zeros(2, 1, N)
    call = {"hidden_states": normal(2, N, 32), "attention_mask": mask}
    output, stats = counted(attn, built_in("HunyuanDiT"), Tokens((H, W)), config, **call)
    assert stats.last_reason == "attention mask"
    assert torch.equal(output, attn(**call))


@torch.no_grad()
def test_flux_single_attention_by_hand() -> None:
    """Merged tokens have the rotary positions of their destinations."""
    attn = seeded(FluxAttention, 0, **SIZE, out_dim=32, pre_only=True)
    hidden, (cos, sin) = normal(3, TEXT + N, 32), normal(2, TEXT + N, 16, seed=1)
    call = {"hidden_states": hidden, "image_rotary_emb": (cos, sin)}
    got = merged(attn, built_in("Flux"), Tokens((H, W), before=TEXT), **call)
    plan = plan_tokens(hidden[:, TEXT:], TAU.tau)
    assert N // 2 < plan.tokens_kept < N
    every = torch.cat([torch.arange(TEXT), plan.kept + TEXT])
    states = torch.cat([hidden[:, :TEXT], plan.merge(hidden[:, TEXT:])], 1)
    out = attn(states, image_rotary_emb=(cos[every], sin[every]))
    torch.testing.assert_close(got[:, :TEXT], out[:, :TEXT])
    torch.testing.assert_close(got[:, TEXT:], plan.restore(out[:, TEXT:]))


@torch.no_grad()
def test_joint_attention_by_hand() -> None:
    joint = {"added_kv_proj_dim": 32, "out_dim": 32, "context_pre_only": False}
    attn = seeded(Attention, 0, **SIZE, **joint, processor=JointAttnProcessor2_0())
    hidden, text = normal(2, N, 32), normal(2, TEXT, 32, seed=1)
    call = {"hidden_states": hidden, "encoder_hidden_states": text}
    image, words = merged(attn, built_in("Stable Diffusion 3"), Tokens((H, W)), **call)
    plan = plan_tokens(hidden, TAU.tau)
    few, expected = attn(plan.merge(hidden), encoder_hidden_states=text)
    torch.testing.assert_close(image, plan.restore(few))
    torch.testing.assert_close(words, expected)


FLUX = case("FluxTransformer2DModel", lambda: HALF_WAY, BLC, num_layers=1)  # tracing takes seconds


def test_flux_positions_are_read_whatever_the_default_device_is() -> None:
    model, inputs = FLUX.build(), FLUX.inputs()
    with torch.device("meta"):
        assert packed(model, inputs) == Tokens((H, W), before=TEXT)


@pytest.mark.parametrize(("fields", "note"), [({"keep": 0.5}, NO_SIZE), ({"tau": 0.1}, "")])
def test_tokens_that_lie_in_no_grid_merge_without_one(fields: dict[str, Any], note: str) -> None:
    model, inputs = FLUX.build(), FLUX.inputs()
    inputs["img_ids"] = inputs["img_ids"].roll(1, 0)
    handle = apply_mame(model, min_tokens=60, **fields)
    run(inputs, model)
    for layer in handle.report().layers:
        assert (layer.merged, layer.size, layer.reason) == (True, None, note)


def test_families_are_saved_with_their_models() -> None:
    every = (*BUILT_IN, ADDED_KEYS, IMAGE_ALONE)
    assert [family.name for family in pickle.loads(pickle.dumps(every))] == [f.name for f in every]


@torch.no_grad()
def test_a_merged_flux_is_exported_after_a_forward_of_that_size() -> None:
    model, inputs = FLUX.build(), {**FLUX.inputs(), "return_dict": False}
    apply_mame(model, keep=0.5, min_tokens=1)
    with pytest.raises(ValueError, match="run the model once"):
        torch.export.export(model, (), inputs, strict=False)
    model(**{**inputs, "encoder_hidden_states": normal(2, 3, 16), "txt_ids": torch.zeros(3, 3)})
    with pytest.raises(ValueError, match="with the same shapes"):
        torch.export.export(model, (), inputs, strict=False)
    want = model(**inputs)[0]
    exported = torch.export.export(model, (), inputs, strict=False).module()
    torch.testing.assert_close(exported(**inputs)[0], want)


def hunyuan(processor: Any) -> Attention:
    return seeded(Attention, 0, **SIZE, qk_norm="layer_norm", processor=processor)


@torch.no_grad()
@pytest.mark.parametrize("fields", [{"keep": 0.25}, {"tau": -1.0}], ids=str)
def test_a_processor_that_cuts_the_batch_merges_each_part(fields: dict[str, Any]) -> None:
    """PAG computes attention for some samples of a batch and skips others."""
    attn = hunyuan(PAGCFGHunyuanAttnProcessor2_0())
    call = {"hidden_states": normal(3, N, 32), "image_rotary_emb": normal(2, N, 16).unbind()}
    config = MaMeConfig(**fields, min_tokens=1)
    output, stats = counted(attn, built_in("HunyuanDiT"), Tokens((H, W)), config, **call)
    before = attn(**call)
    assert stats.last_reason is None
    assert not torch.equal(output[:2], before[:2])
    assert torch.equal(output[2], before[2]) == ("keep" in fields)


@torch.no_grad()
def test_stacked_rotary_positions_are_those_of_the_pair() -> None:
    attn, stacked = hunyuan(HunyuanAttnProcessor2_0()), normal(2, N, 16)
    call, family = {"hidden_states": normal(2, N, 32)}, built_in("HunyuanDiT")
    pair = merged(attn, family, Tokens((H, W)), **call, image_rotary_emb=stacked.unbind())
    assert torch.equal(merged(attn, family, Tokens((H, W)), **call, image_rotary_emb=stacked), pair)


def test_a_call_unlike_its_family_is_left_alone_and_the_report_says_why() -> None:
    class Loose(MyAttention):
        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            return super().forward(x, places[:N].repeat(1, 2)[:, :8])

    attn = seeded(Loose, 0)
    rows = along(places=0)
    family = Family("loose", ("L",), ("Loose",), lambda model, call: None, rows, ("x",))
    call = {"x": normal(2, N, 8), "places": normal(N + 1, 16)}
    with torch.no_grad():
        output, stats = counted(attn, family, Tokens((H, W)), TAU, **call)
        assert torch.equal(output, attn(**call))
    assert stats.last_reason == (
        "expected one position for each of 96 image tokens, got 97 along dimension 0 of [97, 16]"
    )
    assert stats.totals() == (1, N, N)


class MyAttention(nn.Module):
    """Add a learned row per token to queries and keys, so that positions must follow the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        q, k, v = self.to_q(x) + places, self.to_k(x) + places, self.to_v(x)
        return nn.functional.scaled_dot_product_attention(q, k, v)


class MyTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MyAttention()
        self.places = nn.Parameter(torch.randn(96, 8))

    def forward(self, image: Tensor) -> Tensor:  # [B, 8, H, W]
        return self.attention(image.flatten(2).transpose(1, 2), places=self.places)


def test_a_model_of_the_users_own() -> None:
    model = seeded(MyTransformer, 0)
    with pytest.raises(
        ValueError, match=r"MyTransformer, which has 1 MyAttention.*register_family"
    ):
        apply_mame(model, keep=0.5)

    where, rows = pixels("image"), along(places=0)
    register_family(
        Family("mine", ("MyTransformer",), ("MyAttention",), where, rows, inputs=("x",))
    )
    image = normal(2, 8, 8, 12)
    with torch.no_grad():
        before = model(image)
        handle = apply_mame(model, keep=0.5, min_tokens=1)
        assert model(image).shape == before.shape
        (layer,) = handle.report().layers
        assert (layer.tokens_in, layer.tokens_kept, layer.size) == (96, 48, (8, 12))
        handle.set(tau=1.0)
        torch.testing.assert_close(model(image), before)
        remove_mame(model)
        assert torch.equal(model(image), before)


def test_where_the_image_begins() -> None:
    tokens = Tokens((2, 3), before=4, after=5)
    assert [tokens.start(length) for length in (6, 11, 15, 7)] == [0, 0, 4, None]
