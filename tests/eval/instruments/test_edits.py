"""The editor's weights, layout and use of its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from mame_sd import apply_mame
from mame_sd.embedded.model import embedded_model_path
from mame_sd.eval.instruments.edits import GRID, Editor, captions_states, load_editor

SIDE = 16  # latents a side of a part of a picture
CORNER = ((GRID - SIDE // 2) // 2,) * 2  # where diffusers cuts the positions of a smaller image
CAPTION = "rocket on a blue background"


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def editor() -> Editor:
    return load_editor()


def velocity(editor: Editor, references: Tensor) -> Tensor:
    """Return the editor's velocity of one noisy part of a picture, without gradients."""
    with torch.no_grad():
        noisy, time = normal(1, 4, SIDE, SIDE, seed=0), torch.tensor([0.75])
        return editor(noisy, time, references, *captions_states([CAPTION]), CORNER)


def test_without_rotary_positions_it_begins_as_the_embedded_transformer() -> None:
    editor = Editor()

    def none(module: Any, args: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.ones_like(output[0]), torch.zeros_like(output[1])

    editor.model.pos_embed.register_forward_hook(none)
    folder = embedded_model_path("transformer") / "transformer"
    own: Any = SD3Transformer2DModel.from_pretrained(folder)
    noisy, time = normal(1, 4, SIDE, SIDE, seed=0), torch.tensor([750.0])
    with torch.no_grad():
        expected = own(noisy, *captions_states([CAPTION]), time, return_dict=False)[0]
    found = velocity(editor, noisy[:, None][:, :0])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_another_reference_changes_more_than_merging_does(editor: Editor) -> None:
    reference, other = (normal(1, 1, 4, SIDE, SIDE, seed=seed) for seed in (1, 2))
    whole = velocity(editor, reference)
    handle = apply_mame(editor.model, keep=1.0, references=0.25, min_tokens=1)
    merged = velocity(editor, reference)
    assert "keys of 1 reference image too" in str(handle.report())
    handle.remove()
    assert torch.equal(velocity(editor, reference), whole)
    assert 0 < (merged - whole).norm() < (velocity(editor, other) - whole).norm()
