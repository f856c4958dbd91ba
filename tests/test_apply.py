"""One entry for diffusion models and vision transformers, which imports only what it needs."""

from __future__ import annotations

import copy
import io
import subprocess
import sys

import pytest
import torch
from transformers import BertConfig, BertModel, LevitConfig, LevitModel, ResNetConfig, ResNetModel
from transformers.activations import GELUActivation

from mame_sd import apply_mame, mame, remove_mame
from mame_sd.diffusion.families.family import REGISTERED
from mame_sd.diffusion.handle import MaMeHandle
from mame_sd.families import Family, pixels, register_family
from mame_sd.perception.apply_encoder import has_encoder_hooks
from mame_sd.perception.handle import EncoderHandle
from tests.builders.perception import NAMED, VIT
from tests.builders.tiny import run_unet, tiny_unet


@torch.no_grad()
def test_the_target_decides() -> None:
    row = VIT
    encoder, unet = row.build(), tiny_unet()
    before, image = encoder(**row.batch()).logits, run_unet(unet)
    assert isinstance(apply_mame(encoder, keep=0.5), EncoderHandle)
    assert isinstance(apply_mame(unet, keep=0.5, min_tokens=16), MaMeHandle)
    assert not torch.equal(encoder(**row.batch()).logits, before)
    assert not torch.equal(run_unet(unet), image)
    remove_mame(encoder)
    remove_mame(unet)
    with mame(encoder, keep=0.5, blocks=(0,)) as handle:
        assert not torch.equal(encoder(**row.batch()).logits, before)
        assert next(block.tokens_kept < block.tokens_in for block in handle.report().layers)
    assert torch.equal(encoder(**row.batch()).logits, before)
    assert torch.equal(run_unet(unet), image)
    with pytest.raises(TypeError, match="expected a torch module or a diffusers pipeline"):
        apply_mame("vit")


def test_a_vision_transformer_needs_no_diffusers() -> None:
    lines = (
        "import sys, torch",
        "from transformers import ViTConfig, ViTModel",
        "from mame_sd import apply_mame",
        (
            "config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2,"
            " intermediate_size=32, image_size=32, patch_size=4)"
        ),
        "apply_mame(ViTModel(config), keep=0.5)",
        "print('diffusers' in sys.modules)",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


@torch.no_grad()
def test_a_unet_beside_an_image_encoder_is_what_merges() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unet = tiny_unet()
            self.image_encoder = NAMED["CLIPVisionModel"].build()

    both = Both()
    image = run_unet(both.unet)
    with mame(both, keep=0.5, min_tokens=16) as handle:
        assert isinstance(handle, MaMeHandle)
        assert not torch.equal(run_unet(both.unet), image)
    assert torch.equal(run_unet(both.unet), image)
    apply_mame(both.unet, keep=0.5, min_tokens=16)
    apply_mame(both.image_encoder, keep=0.5)
    remove_mame(both)
    assert torch.equal(run_unet(both.unet), image)
    assert not has_encoder_hooks(both)


@torch.no_grad()
def test_a_whole_module_is_saved_with_its_merging() -> None:
    row = VIT
    encoder, unet = row.build(), tiny_unet()
    for model, call in (
        (encoder, lambda one: one(**row.batch()).logits),
        (unet, run_unet),
    ):
        plain = call(model)
        apply_mame(model, keep=0.5, min_tokens=16)
        merged, file = call(model), io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(call(loaded), merged)
        remove_mame(loaded)
        assert torch.equal(call(loaded), plain)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (LevitModel, LevitConfig(hidden_sizes=[16, 16, 16], num_attention_heads=[1, 1, 1])),
        (ResNetModel, ResNetConfig(hidden_sizes=[8], depths=[1], embedding_size=8)),
        (BertModel, BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=1)),
    ],
)
def test_what_is_no_denoiser_is_told_how_a_vision_transformer_is_described(
    kind: type, config: object
) -> None:
    for call in (apply_mame, lambda model: mame(model).__enter__()):
        with pytest.raises(ValueError, match=f"got {kind.__name__}; .*register_encoder"):
            call(kind(config))


@torch.no_grad()
def test_blocks_left_in_any_order_leave_nothing() -> None:
    row = VIT
    model, inputs = row.build(), row.batch()
    plain = model(**inputs).logits
    one, two, three = (mame(target, keep=0.6) for target in (model, model.vit, model))
    for block in (one, two, three):
        block.__enter__()
    merged = model(**inputs).logits
    for block in (two, one):  # the last one's merging is in force
        block.__exit__(None, None, None)
        assert torch.equal(model(**inputs).logits, merged)
    three.__exit__(None, None, None)
    assert torch.equal(model(**inputs).logits, plain)
    assert not has_encoder_hooks(model)
    with mame(model, keep=0.6):
        copied = copy.deepcopy(model)
    assert torch.equal(copied(**inputs).logits, merged), "a copy merges until remove_mame"
    remove_mame(copied)
    assert torch.equal(copied(**inputs).logits, plain)


class Mine(torch.nn.Module):
    """A model that is no library's, with a part of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.Identity()
        self.act = GELUActivation()


def test_a_model_that_derives_from_a_registered_one_is_no_encoder() -> None:
    register_family(Family("mine", ("Mine",), ("Identity",), pixels("hidden_states")))
    try:
        handle = apply_mame(type("Finetuned", (Mine,), {})(), keep=0.5)
        assert isinstance(handle, MaMeHandle)
    finally:
        del REGISTERED["Mine"]
