"""Attention families: each merged call is what merging by hand gives; users can describe models of
their own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from diffusers import (
    FluxControlNetModel,
    FluxTransformer2DModel,
    LTXVideoTransformer3DModel,
    WanTransformer3DModel,
)
from diffusers.models.attention_processor import (
    Attention,
    HunyuanAttnProcessor2_0,
    JointAttnProcessor2_0,
    PAGCFGHunyuanAttnProcessor2_0,
)
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxIPAdapterAttnProcessor
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn

from mame_sd import MaMeConfig, apply_mame, plan_merge, remove_mame
from mame_sd.config import Study
from mame_sd.core.owners import owners_of
from mame_sd.diffusion.families.layouts import packed
from mame_sd.diffusion.families.sequence import SequenceAttention
from mame_sd.diffusion.families.transformers import BUILT_IN, family_of
from mame_sd.diffusion.hook_registry import hook_on
from mame_sd.diffusion.layer import merged_call
from mame_sd.diffusion.model_hooks import SizeHook
from mame_sd.families import Family, Tokens, along, pixels, register_family
from mame_sd.report import LayerStats
from tests.builders.settings import nested
from tests.builders.tiny import seeded, tiny_unet
from tests.builders.tokens import detail_of
from tests.builders.transformers import FLUX, TEXT, H, W, flux_inputs, normal, run

N = H * W
WHOLE: list[dict[str, Any]] = [
    {"keep": 0.5, "merge": "qkv"},
    {"tau": 0.1, "merge": "qkv", "tiles": 0},
    {"keep": 0.5, "merge": "qkv", "detail": True},
]
ONE_OF_EACH = {"num_layers": 1, "num_single_layers": 1}  # for tracing takes seconds a block
FIELDS = [{**fields, "correct": False} for fields in WHOLE]  # merged tokens count once


def counted(
    module: nn.Module, family: Family, tokens: Tokens, config: MaMeConfig, **call: Any
) -> tuple[Any, LayerStats]:
    layer, stats = SequenceAttention(module, family), LayerStats("here")
    return (
        merged_call(layer, layer.call(module, module.forward, (), call), tokens, config, stats),
        stats,
    )


def merged(
    module: nn.Module, family: Family, tokens: Tokens, config: MaMeConfig, **call: Any
) -> Any:
    output, stats = counted(module, family, tokens, config, **call)
    assert stats.last_reason is None
    return output


@pytest.mark.parametrize("fields", FIELDS, ids=["keep", "tau", "detail"])
@pytest.mark.parametrize("text", [0, TEXT], ids=["image", "text-and-image"])
def test_flux_single_attention_by_hand(text: int, fields: dict[str, Any]) -> None:
    attn = seeded(FluxAttention, 0, query_dim=32, heads=2, dim_head=16, out_dim=32, pre_only=True)
    hidden, cos, sin = (
        normal(3, text + N, 32),
        normal(text + N, 16, seed=1),
        normal(text + N, 16, seed=2),
    )
    config = MaMeConfig(min_tokens=1, **nested(fields))
    family = family_of(FluxTransformer2DModel(**FLUX, pooled_projection_dim=8))
    assert family is not None
    with torch.no_grad():
        got = merged(
            attn,
            family,
            Tokens((H, W), before=text),
            config,
            hidden_states=hidden,
            image_rotary_emb=(cos, sin),
        )
        plan = plan_merge(hidden[:, text:], config, (H, W))
        assert plan.tokens_kept < N
        image = plan.merge(hidden[:, text:])
        for i in range(3):
            kept = plan.kept if plan.kept.dim() == 1 else plan.kept[i]
            every = torch.cat([torch.arange(text), kept + text])
            states = torch.cat([hidden[i : i + 1, :text], image[i : i + 1]], 1)
            out = attn(states, image_rotary_emb=(cos[every], sin[every]))
            alone = (
                plan_merge(hidden[i : i + 1, text:], config, (H, W))
                if plan.kept.dim() == 2
                else None
            )
            if alone is not None:
                torch.testing.assert_close(
                    got[i : i + 1, text:],
                    alone.restore(
                        out[:, text:], detail_of(hidden[i : i + 1, text:], config, (H, W))
                    ),
                )
            torch.testing.assert_close(got[i : i + 1, :text], out[:, :text])
            if not config.detail:
                torch.testing.assert_close(
                    got[i : i + 1, text:][:, kept[:5]], out[:, text : text + 5]
                )


@pytest.mark.parametrize(
    ("text", "fields"),
    [(TEXT, WHOLE[0]), (TEXT, WHOLE[1]), (TEXT, {"keep": 0.4, "merge": "qkv"}), (0, WHOLE[1])],
    ids=["even", "tau", "uneven", "tau, no text"],
)
def test_whole_merged_tokens_beside_text_count_as_often_as_they_stand_for_tokens(
    text: int, fields: dict[str, Any]
) -> None:
    """As if every token were there, holding its group's mean at its destination's place."""
    attn = seeded(FluxAttention, 0, query_dim=32, heads=2, dim_head=16, out_dim=32, pre_only=True)
    hidden, cos, sin = (
        normal(3, text + N, 32),
        normal(text + N, 16, seed=1),
        normal(text + N, 16, seed=2),
    )
    config = MaMeConfig(min_tokens=1, **nested({"detail": False, **fields}))
    family = next(family for family in BUILT_IN if family.name == "Flux")
    with torch.no_grad():
        got = merged(
            attn,
            family,
            Tokens((H, W), before=text),
            config,
            hidden_states=hidden,
            image_rotary_emb=(cos, sin),
        )
        plan = plan_merge(hidden[:, text:], config, (H, W))
        means = torch.cat([hidden[:, :text], plan.restore(plan.merge(hidden[:, text:]))], 1)
        owners = torch.cat([torch.arange(text).expand(3, -1), owners_of(plan) + text], 1)
        for i, places in enumerate(owners):
            expected = attn(means[i : i + 1], image_rotary_emb=(cos[places], sin[places]))
            torch.testing.assert_close(got[i : i + 1], expected)


def test_whole_merged_tokens_of_joint_attention_count_as_often_as_they_stand_for_tokens() -> None:
    attn = seeded(
        Attention,
        0,
        query_dim=32,
        added_kv_proj_dim=32,
        heads=2,
        dim_head=16,
        out_dim=32,
        context_pre_only=False,
        processor=JointAttnProcessor2_0(),
    )
    hidden, text = normal(2, N, 32), normal(2, TEXT, 32, seed=1)
    config = MaMeConfig(keep=0.25, merge="qkv", min_tokens=1, study=Study(detail=False))
    family = next(family for family in BUILT_IN if family.name == "Stable Diffusion 3")
    with torch.no_grad():
        image, words = merged(
            attn, family, Tokens((H, W)), config, hidden_states=hidden, encoder_hidden_states=text
        )
        plan = plan_merge(hidden, config, (H, W))
        means = plan.restore(plan.merge(hidden))
        for got, expected in zip(
            (image, words), attn(means, encoder_hidden_states=text), strict=True
        ):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("fields", FIELDS, ids=["keep", "tau", "detail"])
def test_wan_attention_by_hand(fields: dict[str, Any]) -> None:
    times = 3
    attn = seeded(WanAttention, 0, dim=32, heads=2, dim_head=16, processor=WanAttnProcessor())
    hidden = normal(2, times * N, 32)
    rotary = normal(1, times * N, 1, 16, seed=1), normal(1, times * N, 1, 16, seed=2)
    config = MaMeConfig(min_tokens=1, **nested(fields))
    family = family_of(
        seeded(WanTransformer3DModel, 0, num_layers=0, num_attention_heads=2, attention_head_dim=12)
    )
    assert family is not None
    # the plane by index: row y of frame t is row y * times + t
    order = torch.arange(times * N).view(times, H, W).permute(1, 0, 2).flatten()
    with torch.no_grad():
        got = merged(
            attn, family, Tokens((times, H, W)), config, hidden_states=hidden, rotary_emb=rotary
        )
        for i in range(2) if config.keep else [slice(None)]:
            one = hidden[i : i + 1] if isinstance(i, int) else hidden
            plan = plan_merge(one[:, order], config, (H * times, W))
            kept = order[plan.kept.reshape(-1)]
            out = attn(
                plan.merge(one[:, order]), rotary_emb=tuple(part[:, kept] for part in rotary)
            )
            expected = torch.empty_like(one)
            expected[:, order] = plan.restore(out, detail_of(one[:, order], config, (H * times, W)))
            torch.testing.assert_close(got[i : i + 1] if isinstance(i, int) else got, expected)


def test_a_tile_of_a_video_spans_frames() -> None:
    """A token that is alike only in the next frame merges with it there."""
    frames = normal(1, 1, N, 32).expand(1, 2, N, 32).reshape(1, 2 * N, 32)
    attn = seeded(WanAttention, 0, dim=32, heads=2, dim_head=16, processor=WanAttnProcessor())
    family = Family("v", ("V",), ("WanAttention",), lambda model, call: None)
    config = MaMeConfig(tau=0.999, min_tokens=1, tiles=8, study=Study(stride=(2, 1)))
    _, stats = counted(attn, family, Tokens((2, H, W)), config, hidden_states=frames)
    assert stats.tokens_kept == N


def flux(**sizes: int) -> tuple[FluxTransformer2DModel, dict[str, Any]]:
    model = seeded(FluxTransformer2DModel, 0, **FLUX | sizes, pooled_projection_dim=8)
    return model, {
        **flux_inputs(),
        "pooled_projections": normal(2, 8),
        "timestep": torch.tensor([0.5, 0.5]),
    }


def test_text_of_flux_never_merges() -> None:
    """Equal text tokens come out unequal from nothing but their places: none of them was
    averaged.
    """
    model, inputs = flux()
    seen: list[Tensor] = []
    attn = model.single_transformer_blocks[0].attn
    attn.to_k.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    run(inputs, model)
    apply_mame(model, keep=0.5, merge="qkv", study=Study(stride=(2, 2)), min_tokens=1)
    run(inputs, model)
    plain, halves = seen[0], seen[1:]
    assert [part.shape[1] for part in halves] == [TEXT + N // 2] * 2  # each sample keeps its own
    assert halves[0].shape[0] == 1
    assert plain.shape[1] == TEXT + N


def test_flux_positions_are_read_whatever_the_default_device_is() -> None:
    model, inputs = flux()
    with torch.device("meta"):
        assert packed(model, inputs) == Tokens((H, W), before=TEXT)


@pytest.mark.parametrize("ids", ["rolled", "random"])
def test_flux_tokens_that_lie_in_no_grid_merge_without_one(ids: str) -> None:
    model, inputs = flux()
    inputs["img_ids"] = inputs["img_ids"].roll(1, 0) if ids == "rolled" else normal(N, 3, seed=4)
    handle = apply_mame(model, keep=0.5, min_tokens=1)
    run(inputs, model)
    for layer in handle.report().layers:
        assert layer.merged
        assert layer.size is None
        assert layer.tokens_kept == layer.tokens_in // 2


@torch.no_grad()
def test_a_merged_flux_is_exported_after_a_forward_of_that_size() -> None:
    model, inputs = flux(**ONE_OF_EACH)
    inputs["return_dict"] = False
    handle = apply_mame(model, keep=0.5, min_tokens=1)
    with pytest.raises(ValueError, match="run the model once"):
        torch.export.export(model, (), inputs, strict=False)
    model(**{**inputs, "encoder_hidden_states": normal(2, 3, 16), "txt_ids": torch.zeros(3, 3)})
    with pytest.raises(ValueError, match="with the same shapes"):
        torch.export.export(model, (), inputs, strict=False)
    want = model(**inputs)[0]
    exported = torch.export.export(model, (), inputs, strict=False).module()
    torch.testing.assert_close(exported(**inputs)[0], want)
    handle.active = False
    off = torch.export.export(model, (), inputs, strict=False).module()
    torch.testing.assert_close(off(**inputs)[0], model(**inputs)[0])
    assert not torch.allclose(off(**inputs)[0], want)


@torch.no_grad()
def test_positions_are_not_read_while_merging_is_off() -> None:
    model, inputs = flux()
    handle = apply_mame(model, keep=0.5, min_tokens=1)
    handle.active = False
    inputs["img_ids"] = inputs["img_ids"].to("meta")
    reader = hook_on(model, SizeHook.name)
    assert isinstance(reader, SizeHook)
    reader(model, (), inputs)
    assert reader.tokens.value is None
    handle.active = True
    with pytest.raises(NotImplementedError):
        reader(model, (), inputs)


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({"keep": 0.25}, ONE_OF_EACH),
        ({"keep": 0.4}, ONE_OF_EACH),
        ({"tau": 0.3}, {"num_layers": 0, "num_single_layers": 1}),  # of many graphs
    ],
    ids=["even", "uneven", "tau"],
)
@torch.no_grad()
def test_whole_merged_tokens_are_counted_in_compiled_models(
    fields: dict[str, Any], sizes: dict[str, int]
) -> None:
    torch._dynamo.reset()
    model, inputs = flux(**sizes)
    handle = apply_mame(model, merge="qkv", min_tokens=1, **nested(fields))
    expected = run(inputs, model)
    assert not any("count once" in layer.reason for layer in handle.report().layers)
    torch.testing.assert_close(run(inputs, torch.compile(model, backend="eager")), expected)
    handle.set(study=Study(correct=False))
    assert not torch.allclose(run(inputs, model), expected)


def test_steps_of_flux_have_destinations_of_their_own() -> None:
    model, inputs = flux()
    handle = apply_mame(model, keep=0.25, min_tokens=1)
    drawn = run(inputs, model)
    handle.set(study=Study(redraw=False))
    assert not torch.equal(run(inputs, model), drawn)
    handle.set(study=Study(redraw=True))
    assert torch.equal(run(inputs, model), drawn)


@pytest.mark.parametrize(
    "fields",
    [
        {"keep": 0.25},
        {"keep": 0.4},
        {"keep": 0.4, "merge": "qkv"},
        {"keep": 0.25, "weights": "pick"},
    ],
    ids=str,
)
def test_a_guided_pair_of_flux_merges_by_the_guided_sample(fields: dict[str, Any]) -> None:
    """Its output is that of no pair, in rotary attention too, where samples that keep tokens of
    their own run alone.
    """
    model, inputs = flux()
    latents = inputs["hidden_states"][1:]
    inputs["hidden_states"] = latents.repeat(2, 1, 1)
    handle = apply_mame(model, min_tokens=1, **nested(fields))
    pair = run(inputs, model)
    handle.set(study=Study(pairs=False))
    apart = run(inputs, model)
    torch.testing.assert_close(pair[1], apart[1])
    alike = fields.get("weights") == "pick"  # which compares nothing at a share of its cells
    assert torch.equal(pair[0], apart[0]) == alike


def test_samples_that_keep_the_same_tokens_run_together() -> None:
    model, inputs = flux()
    seen: list[tuple[int, ...]] = []
    apply_mame(model, keep=0.25, merge="qkv", min_tokens=1)
    hook = model.single_transformer_blocks[0].attn.to_k.register_forward_pre_hook(
        lambda module, args: seen.append(tuple(args[0].shape[:2]))
    )
    both = run(inputs, model)
    hook.remove()
    assert seen == [(2, TEXT + N // 4)]
    first = {key: value if key.endswith("ids") else value[:1] for key, value in inputs.items()}
    torch.testing.assert_close(run(first, model), both[:1])


def test_each_sample_sees_its_own_image_prompt() -> None:
    attn = seeded(
        FluxAttention, 0, query_dim=32, heads=2, dim_head=16, out_dim=32, added_kv_proj_dim=32
    )
    attn.set_processor(
        seeded(FluxIPAdapterAttnProcessor, 1, hidden_size=32, cross_attention_dim=24)
    )
    family = family_of(FluxTransformer2DModel(**FLUX, pooled_projection_dim=8))
    assert family is not None
    rotary = normal(TEXT + N, 16), normal(TEXT + N, 16, seed=1)
    hidden, text, prompt = normal(2, N, 32), normal(2, TEXT, 32), normal(2, 1, 4, 24)

    def run_samples(chosen: slice) -> Any:
        return merged(
            attn,
            family,
            Tokens((H, W), before=TEXT),
            MaMeConfig(keep=0.5, merge="qkv", min_tokens=1),
            hidden_states=hidden[chosen],
            encoder_hidden_states=text[chosen],
            image_rotary_emb=rotary,
            ip_hidden_states=[prompt[chosen]],
        )

    with torch.no_grad():
        both, first, second = (run_samples(chosen) for chosen in (slice(2), slice(1), slice(1, 2)))
    for i in range(3):  # image, text, image prompt
        torch.testing.assert_close(both[i], torch.cat([first[i], second[i]]))


def hunyuan(processor: Any) -> Attention:
    return seeded(
        Attention, 0, query_dim=32, heads=2, dim_head=16, qk_norm="layer_norm", processor=processor
    )


def hunyuan_family() -> Family:
    return next(family for family in BUILT_IN if family.name == "HunyuanDiT")


def test_a_processor_that_cuts_the_batch_is_left_alone_where_samples_run_alone() -> None:
    attn = hunyuan(PAGCFGHunyuanAttnProcessor2_0())
    call = {
        "hidden_states": normal(3, N, 32),
        "image_rotary_emb": (normal(N, 16), normal(N, 16, seed=1)),
    }
    half, same = (
        MaMeConfig(keep=keep, merge="qkv", study=Study(stride=(2, 2)), min_tokens=1)
        for keep in (0.5, 0.25)
    )
    with torch.no_grad():
        output, stats = counted(attn, hunyuan_family(), Tokens((H, W)), half, **call)
        assert torch.equal(output, attn(**call))
        assert stats.last_reason is not None
        assert stats.last_reason.startswith(
            "PAGCFGHunyuanAttnProcessor2_0, which cuts the batch into parts"
        )
        _, stats = counted(attn, hunyuan_family(), Tokens((H, W)), same, **call)
        assert (stats.last_reason, stats.tokens_kept) == (None, N // 4)


def test_stacked_rotary_positions_are_those_of_the_pair() -> None:
    attn, hidden = hunyuan(HunyuanAttnProcessor2_0()), normal(2, N, 32)
    pair, config = (
        (normal(N, 16), normal(N, 16, seed=1)),
        MaMeConfig(keep=0.5, merge="qkv", min_tokens=1),
    )
    with torch.no_grad():
        outputs = [
            merged(
                attn,
                hunyuan_family(),
                Tokens((H, W)),
                config,
                hidden_states=hidden,
                image_rotary_emb=rotary,
            )
            for rotary in (pair, torch.stack(pair))
        ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("rows", "more", "reason"),
    [
        (
            N + 1,
            {},
            (
                r"expected one position for each of 96 image tokens, got 97 along dimension 0 of"
                r" \[97, 16\]"
            ),
        ),
        (
            N,
            {"ids": {1, 2}},
            r"arguments of set can't be split into samples that keep their own tokens",
        ),
    ],
    ids=["rows", "arguments"],
)
def test_a_call_unlike_its_family_is_left_alone_and_the_report_says_why(
    rows: int, more: Any, reason: str
) -> None:
    class Loose(MyAttention):
        def forward(self, x: Tensor, places: Tensor, ids: Any = None) -> Tensor:
            return super().forward(x, places[:N].repeat(1, 2)[:, :8])

    attn = seeded(Loose, 0)
    family = Family(
        "loose",
        ("L",),
        ("Loose",),
        lambda model, call: None,
        lambda call, rows: {"places": rows(call["places"], 0)},
        ("x",),
    )
    call = {"x": normal(2, N, 8), "places": normal(rows, 16), **more}
    with torch.no_grad():
        output, stats = counted(
            attn,
            family,
            Tokens((H, W)),
            MaMeConfig(keep=0.5, merge="qkv", study=Study(stride=(2, 2)), min_tokens=1),
            **call,
        )
        assert torch.equal(output, attn(**call))
    assert re.fullmatch(reason, stats.last_reason or "")
    assert (stats.tokens_in, stats.tokens_kept) == (N, N)


def test_inputs_of_unequal_length_are_left_alone() -> None:
    class Cross(MyAttention):
        def forward(self, x: Tensor, places: Tensor, context: Tensor) -> Tensor:
            return super().forward(x, places) + context.mean(1, keepdim=True)

    attn = seeded(Cross, 0)
    family = Family("two", ("T",), ("Cross",), lambda model, call: None, None, ("x", "context"))
    call = {"x": normal(2, N, 8), "places": normal(N, 8), "context": normal(2, N - 3, 8)}
    with torch.no_grad():
        output, stats = counted(
            attn, family, Tokens((H, W)), MaMeConfig(keep=0.5, min_tokens=1), **call
        )
        assert torch.equal(output, attn(**call))
    assert stats.last_reason == "93 tokens are not those of 8 x 12"


LTX_SIZE = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "cross_attention_dim": 32,
    "num_layers": 1,
    "caption_channels": 16,
}


def ltx_inputs(**others: Any) -> dict[str, Any]:
    return {
        "encoder_hidden_states": normal(1, TEXT, 16),
        "encoder_attention_mask": torch.ones(1, TEXT),
        "timestep": torch.tensor([5]),
        **others,
    }


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "num_frames, height and width are not given"),
        ({"video_coords": normal(1, 3, 2 * N).abs()}, "video_coords are no grid"),
    ],
)
def test_ltx_without_sides_is_left_alone(given: dict[str, Any], why: str) -> None:
    model: Any = seeded(LTXVideoTransformer3DModel, 0, **LTX_SIZE)
    model.rope.forward = lambda hidden_states, *_: (torch.ones(1, 2 * N, 32),) * 2
    inputs = ltx_inputs(hidden_states=normal(1, 2 * N, 4), **given)
    before = run(inputs, model)
    handle = apply_mame(model, keep=0.5, min_tokens=1)
    assert torch.equal(run(inputs, model), before)
    with pytest.raises(RuntimeError, match=why):
        handle.report()


def test_the_mode_of_a_controlnet_union_stands_before_the_text() -> None:
    model = seeded(FluxControlNetModel, 0, **FLUX, pooled_projection_dim=8, num_mode=3)
    inputs = {
        **flux_inputs(),
        "controlnet_cond": normal(2, N, 4, seed=3),
        "controlnet_mode": torch.tensor([[1], [1]]),
        "pooled_projections": normal(2, 8),
        "timestep": torch.tensor([0.5, 0.5]),
    }
    handle = apply_mame(model, keep=0.5, min_tokens=1)
    run(inputs, model)
    assert {(layer.tokens_in, layer.tokens_kept) for layer in handle.report().layers} == {
        (N, N // 2)
    }


class MyAttention(nn.Module):
    """Attention with one learned row per token added to queries and keys: positions must follow the
    tokens.
    """

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


def test_a_family_of_ones_own_comes_before_a_built_in_one_whenever_it_is_registered() -> None:
    """Also where it is registered before `apply_mame` has been imported at all."""
    lines = (
        "from mame_sd.families import Family, Tokens, register_family",
        (
            "mine = register_family(Family('mine', ('WanTransformer3DModel',), ('X',), lambda"
            " model, call: None))"
        ),
        "import mame_sd; mame_sd.apply_mame",
        "from mame_sd.diffusion.families.transformers import family_of",
        "from diffusers import WanTransformer3DModel",
        "import torch",
        "with torch.device('meta'): model = WanTransformer3DModel(num_layers=0)",
        "assert family_of(model) is mine",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_where_the_image_begins() -> None:
    tokens = Tokens((2, 3), before=4, after=5)
    assert [tokens.start(length) for length in (6, 11, 15, 7)] == [0, 0, 4, None]


def test_a_unet_is_no_family() -> None:
    assert family_of(tiny_unet()) is None
