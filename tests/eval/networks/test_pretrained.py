"""The DINOv2-S with a saliency head: published names load, whatever transformers calls them, and
the head maps every pixel.
"""

from __future__ import annotations

import pytest
import torch

from mame_sd.eval.networks import pretrained


def published(name: str) -> str:
    """A name of 5.23's module as DINOv2's weights were published."""
    for new, old in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
        name = name.replace(f"attention.{new}.", f"attention.attention.{old}.")
    return name.replace("attention.o_proj.", "attention.output.dense.")


def test_published_names_load_and_the_head_maps_every_pixel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    made = pretrained.DinoSaliency().eval()
    tensors = {
        published(k): v
        for k, v in made.state_dict().items()
        if "num_batches" not in k and "mask_token" not in k
    }
    monkeypatch.setattr(pretrained, "load", lambda *_: tensors)
    loaded = pretrained.load_dinov2_saliency()
    pixels = torch.randn(1, 3, 28, 56)
    with torch.no_grad():
        assert torch.equal(loaded(pixels), made(pixels))
        assert loaded(pixels).shape == (1, 1, 28, 56)
