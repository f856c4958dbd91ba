"""Every denoiser of the installed diffusers.

It merges where the probe says, as a float64 loop does, or is refused for a reason that shows.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from diffusers import Kandinsky5T2VPipeline, LTXConditionPipeline
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.transformers import transformer_flux2
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

from mame_sd import apply_mame, remove_mame
from mame_sd.diffusion.families import transformers
from mame_sd.diffusion.families.family import REGISTERED
from mame_sd.diffusion.families.layouts import UNLIKE
from mame_sd.families import Family, Tokens, register_family
from mame_sd.refused import DIFFUSERS
from tests.builders.transformers import TEXT, H, W, normal, run
from tests.matrix.backends import check_kernels
from tests.matrix.models import images, others
from tests.matrix.models.case import WORDS, Case, T, case
from tests.matrix.models.probe import check_probe
from tests.matrix.models.registry import CASES, MODELS, tiny_model
from tests.matrix.models.sweep import RECORD, classes, outcome, tensors_of
from tests.matrix.models.watch import check_by_loop, merging

RECORDED = json.loads(RECORD.read_text(encoding="utf-8"))
# One of each way in which attention is called: by itself, through the dispatcher, with a mask, with
# fewer heads of keys than of queries, of a video.
KERNELS = (
    "SD3Transformer2DModel",
    "FluxTransformer2DModel",
    "QwenImageTransformer2DModel",
    "Krea2Transformer2DModel",
    "WanTransformer3DModel",
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_model(case: Case) -> None:
    model: Any = case.build()
    before = tensors_of(model, case)
    found = outcome(case, model)
    assert found == RECORDED[case.name], "run: python -m tests.matrix --sweep"
    with merging() as calls:
        merged = tensors_of(model, case)
    assert any(not torch.equal(a, b) for a, b in zip(merged, before, strict=True)), (
        "merging changed nothing"
    )
    assert calls or not case.image
    if not case.image:  # a UNet's layers, which differ in size alone
        calls = [*{call.call["query"].shape: call for call in calls}.values()]
    for call in calls:
        check_by_loop(call)
    remove_mame(model)
    assert all(map(torch.equal, tensors_of(model, case), before)), "removal is not bit-exact"
    if case.image:
        check_probe(case, model)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str) -> None:
    case, model = MODELS[name], MODELS[name].build()
    check_kernels(lambda: tensors_of(model, case), apply_mame(model, keep=0.5, min_tokens=1))


def cached_calls(model: Any, inputs: dict[str, Any]) -> list[Any]:
    """Return the calls that merge of one forward, each checked against the loop."""
    handle = apply_mame(model, keep=0.5, min_tokens=1)
    with torch.no_grad(), merging() as calls:
        model(**inputs)
    assert all(layer.merged for layer in handle.report().layers)
    for call in calls:
        check_by_loop(call)
    return calls


def test_keys_of_a_cached_prompt_stand_before_the_image() -> None:
    """Check Qwen-Image 2.1, which attends to keys of its first call."""
    model, inputs = tiny_model("QwenImage21Transformer2DModel")
    cache = QwenImage21KVCache(2)
    with torch.no_grad():
        model(**inputs, kv_cache=cache, kv_cache_mode="extract")
    calls = cached_calls(model, {**inputs, "kv_cache": cache, "kv_cache_mode": "cached"})
    assert {(call.first, call.tokens) for call in calls} == {(TEXT, H * W)}


def test_keys_of_cached_references_stand_before_the_image() -> None:
    """Check Flux 2 with text, references of an earlier call, and the image."""
    model, inputs = tiny_model("Flux2Transformer2DModel")
    for module in model.modules():
        kind = {
            "Flux2Attention": transformer_flux2.Flux2KVAttnProcessor,
            "Flux2ParallelSelfAttention": transformer_flux2.Flux2KVParallelSelfAttnProcessor,
        }.get(type(module).__name__)
        if kind is not None:
            module.set_processor(kind())
    references = 20
    ids = torch.cat([torch.ones(references, 4), inputs["img_ids"]])
    filled = {**inputs, "hidden_states": normal(2, references + H * W, 4), "img_ids": ids}
    handle = apply_mame(model, keep=0.5, min_tokens=1)
    with torch.no_grad():
        cache = model(
            **filled, kv_cache_mode="extract", num_ref_tokens=references, return_dict=False
        )[1]
    with pytest.raises(RuntimeError, match="fills a cache of reference images"):
        handle.report()
    calls = cached_calls(model, {**inputs, "kv_cache": cache, "kv_cache_mode": "cached"})
    assert {(call.first, call.tokens) for call in calls} == {(TEXT + references, H * W)}


def test_the_last_of_several_images_merges() -> None:
    """Check Z-Image's omni mode: captions of 64, a reference of 32, the image, SigLIP's 64."""
    model: Any = images.z_image(siglip_feat_dim=16).build()
    inputs = images.omni()
    handle = apply_mame(model, keep=0.5, min_tokens=1)
    with torch.no_grad(), merging() as calls:
        model(**inputs)
    assert [layer.name for layer in handle.report().layers if layer.merged] == [
        "layers.0.attention",
        "layers.1.attention",
    ]
    for call in calls:
        assert (call.first, call.tokens) == (96, H * W)
        check_by_loop(call)
    remove_mame(model)
    inputs["cap_feats"][1] = [WORDS[1].repeat(5, 1), WORDS[1]]  # a longer caption
    left_alone(model, inputs, UNLIKE)


def test_refiners_of_z_image_are_told_from_the_whole_sequence() -> None:
    """Check sequences of one length: a reference with SigLIP's tokens, and long captions."""
    omni = images.omni()
    big = normal(4, 1, 10, 24)  # 5 x 12 tokens
    omni["x"] = [[big, omni["x"][i][1]] for i in range(2)]
    plain, inputs = tiny_model("ZImageTransformer2DModel")
    inputs["cap_feats"] = [text.new_ones(H * W, text.shape[1]) for text in inputs["cap_feats"]]
    for model, given, merging_parts in (
        (images.z_image(siglip_feat_dim=16).build(), omni, {"layers"}),
        (plain, inputs, {"noise_refiner", "layers"}),
    ):
        handle = apply_mame(model, keep=0.5, min_tokens=1)
        run(given, model)
        layers = handle.report().layers
        assert {one.name.partition(".")[0] for one in layers if one.merged} == merging_parts


def left_alone(model: Any, inputs: dict[str, Any], why: str, **how: Any) -> None:
    """Check that merging leaves each layer of this call as it is, and that the report says why."""
    before = run(inputs, model)
    handle = apply_mame(model, min_tokens=1, **(how or {"keep": 0.5}))
    assert torch.equal(run(inputs, model), before)
    with pytest.raises(RuntimeError, match=why):
        handle.report()


def test_captions_of_unequal_length_put_images_elsewhere() -> None:
    """Lumina 2 puts each sample's image right behind its caption, so no plan holds for both."""
    model, inputs = tiny_model("Lumina2Transformer2DModel")
    inputs["encoder_attention_mask"] = torch.arange(TEXT) < torch.tensor([[TEXT], [4]])
    left_alone(model, inputs, UNLIKE)


@pytest.mark.parametrize(
    ("name", "first"),
    [("Ideogram4Transformer2DModel", TEXT), ("HiDreamImageTransformer2DModel", 0)],
)
def test_captions_of_unequal_length_leave_images_in_place(name: str, first: int) -> None:
    """Check Ideogram 4, which pads captions at their left, and HiDream, at their right."""
    model, inputs = tiny_model(name)
    for text, value in inputs.items():  # what the second sample lacks: that of Ideogram is masked
        if text.startswith("encoder_hidden_states_"):
            value[..., 1, 4:, :] = 0
    calls = cached_calls(model, inputs)
    assert {(call.first, call.tokens) for call in calls} == {(first, H * W)}


@pytest.mark.parametrize("how", [{"keep": 0.5}, {"tau": 0.5}], ids=str)
def test_a_mask_for_regions_of_the_image_leaves_it_whole(how: dict[str, Any]) -> None:
    """Chroma hides from each query what the mask hides: here half of the image's tokens."""
    model, inputs = tiny_model("ChromaTransformer2DModel")
    inputs["attention_mask"][:, TEXT + H * W // 2 :] = False
    why = r"an attention mask .*the image's (keys differ|tokens)"
    left_alone(model, inputs, why, **how)


def test_keys_that_unets_add_stay_whole() -> None:
    """Kandinsky 2.2: the text's keys stand before the image's."""
    model = others.KANDINSKY.build()
    handle = apply_mame(model, keep=0.5, min_tokens=1)
    with merging() as calls:
        run(others.KANDINSKY.inputs(), model)
    assert len(calls) == len(handle.report().layers)
    for call in calls:
        assert call.first == call.call["key"].shape[-2] - call.tokens > 0
        check_by_loop(call)


@pytest.mark.parametrize("conditions", [(), (9,), (9, 25)], ids=str)
def test_ltx_with_conditions_merges_its_video_alone(conditions: tuple[int, ...]) -> None:
    """Check the pipeline's own coordinates, with frames of conditions before the video."""
    model, inputs = tiny_model("LTXVideoTransformer3DModel")
    pipe = LTXConditionPipeline
    ids = [
        pipe._scale_video_ids(pipe._prepare_video_ids(2, count, H, W), frame_index=index)
        for index, count in [*((index, 2) for index in conditions), (0, T)]
    ]
    coordinates = torch.cat(ids, 2).float()
    coordinates[:, 0] /= 25  # frames of a second
    for side in ("num_frames", "height", "width"):
        del inputs[side]
    inputs["hidden_states"] = normal(2, coordinates.shape[2], 4)
    calls = cached_calls(model, {**inputs, "video_coords": coordinates})
    before = 2 * H * W * len(conditions)
    assert {(call.first, call.tokens) for call in calls} == {(before, T * H * W)}


@pytest.mark.parametrize("behind", [0, 2 * H * W])
def test_ltx2_leaves_what_conditions_add_behind_its_video(behind: int) -> None:
    model, inputs = tiny_model("LTX2VideoTransformer3DModel")
    coordinates = model.rope.prepare_video_coords(2, T, H, W, torch.device("cpu"))
    inputs["video_coords"] = torch.cat([coordinates, coordinates[:, :, :behind] + 1], 2)
    inputs["hidden_states"] = torch.cat([inputs["hidden_states"], normal(2, behind, 4)], 1)
    calls = cached_calls(model, inputs)
    assert {(call.first, call.tokens) for call in calls} == {(0, T * H * W)}
    assert {call.call["key"].shape[-2] for call in calls} == {T * H * W + behind}


def test_a_registered_family_comes_before_a_refusal() -> None:
    model = case("SanaTransformer2DModel", num_layers=1, sample_size=16).build()
    before = dict(REGISTERED)
    kinds = (type(model).__name__,), ("Attention.attn2",)
    register_family(Family("mine", *kinds, lambda model, call: Tokens((H, W))))
    try:
        assert apply_mame(model).root is model
    finally:
        REGISTERED.clear()
        REGISTERED.update(before)
        remove_mame(model)


@pytest.mark.parametrize("name", ["HunyuanVideoTransformer3DModel", "Flux2Transformer2DModel"])
def test_a_model_that_no_family_knows_is_an_error_that_says_what_to_do(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HunyuanVideo has a text refiner, whose attention alone is no reason to accept it."""
    monkeypatch.setattr(transformers, "_MODELS", {})
    with pytest.raises(ValueError, match=r"is not supported yet: .*with .*register_family"):
        apply_mame(MODELS[name].build())


def test_the_sparse_mode_of_kandinsky_5_is_left_alone() -> None:
    """Its nabla mode goes by blocks of keys that the model picks: no softmax over the image."""
    model, inputs = tiny_model("Kandinsky5Transformer3DModel")
    window = {"attention_wT": 3, "attention_wH": 3, "attention_wW": 3, "attention_P": 0.9}
    model.register_to_config(attention_type="nabla", **window)
    inputs = {name: value[:1] for name, value in inputs.items()}
    inputs["hidden_states"] = normal(1, 2, 16, 16, 4)
    inputs["visual_rope_pos"] = [torch.arange(n) for n in (2, 8, 8)]
    inputs["text_rope_pos"] = torch.arange(TEXT)
    pipe = Kandinsky5T2VPipeline(model, *[None] * 6)
    inputs["sparse_params"] = pipe.get_sparse_params(inputs["hidden_states"], "cpu")
    # `set_attention_backend` would hold for all models after it.
    with attention_backend("flex"):
        left_alone(model, inputs, "sparse_params")


def test_the_causal_mode_of_skyreels_is_left_alone() -> None:
    """Frames see none of the blocks of frames behind them."""
    model, inputs = tiny_model("SkyReelsV2Transformer3DModel")
    model._set_ar_attention(1 + T // 2)
    inputs["hidden_states"] = torch.cat([inputs["hidden_states"]] * 2, 2)[:, :, :4]
    left_alone(model, inputs, "attention mask")


def test_every_class_has_a_case() -> None:
    known = MODELS.keys() | DIFFUSERS.keys()
    assert classes() - known == set()
    assert RECORDED.keys() == MODELS.keys()


@pytest.mark.parametrize("name", sorted(DIFFUSERS))
def test_refused_models_say_why(name: str) -> None:
    kind = type(name, (torch.nn.Module,), {})
    with pytest.raises(ValueError, match="does not merge: ") as caught:
        apply_mame(kind())
    assert DIFFUSERS[name] in str(caught.value)
