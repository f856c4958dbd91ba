"""The DINOv2-S: published names load, whatever transformers calls them."""

from __future__ import annotations

import pytest
import torch
from transformers import Dinov2Config, Dinov2Model

from mame_sd.eval.networks import pretrained


def published(name: str) -> str:
    """A name of 5.23's module as DINOv2's weights were published, beside those of a head."""
    for new, old in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
        name = name.replace(f"attention.{new}.", f"attention.attention.{old}.")
    return "backbone." + name.replace("attention.o_proj.", "attention.output.dense.")


def test_published_names_load(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": 12}
    made = Dinov2Model(Dinov2Config(image_size=518, patch_size=14, **sizes)).eval()
    tensors = {published(k): v for k, v in made.state_dict().items() if "mask_token" not in k}
    tensors["decoder.final_conv.bias"] = torch.zeros(1)
    monkeypatch.setattr(pretrained, "load", lambda *_: tensors)
    pixels = torch.randn(1, 3, 28, 56)
    with torch.no_grad():
        found = pretrained.load_dinov2()(pixels).last_hidden_state
        assert torch.equal(found, made(pixels).last_hidden_state)
