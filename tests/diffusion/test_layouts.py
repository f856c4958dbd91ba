"""Test layouts that are read from a call's tensors: once, not at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mame_sd.diffusion.context import Tokens
from mame_sd.diffusion.families import layouts
from mame_sd.diffusion.families.layouts import UNLIKE, cached_by_tensor

MODEL = nn.Identity()
OUTPUT_IMAGE_INDICATOR = 1  # as the module of Ideogram 4 has it
READS = {"cpu", "tolist", "item", "__int__", "__bool__", "nonzero", "unique", "unique_consecutive"}


class NoReads(TorchFunctionMode):
    """Refuse operations that wait for the device while entered."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(func, "__name__", "") not in READS, func
        return func(*args, **(kwargs or {}))


def places(h: int, w: int, *first: int) -> Tensor:
    """Return (image, row, column) of each token, [h * w, 3]."""
    return torch.cartesian_prod(torch.tensor(first or (0,)), torch.arange(h), torch.arange(w))


def calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    text = torch.zeros(1, 7, 4)
    return {
        "Flux": (layouts.packed, {"img_ids": places(3, 4, 0, 1), "encoder_hidden_states": text}),
        "Krea 2": (layouts.krea2, {"position_ids": places(3, 4)}),
        "MiniMax H3": (
            layouts.minimax_h3,
            {"video_indices": torch.arange(12), "position_ids": places(3, 4)},
        ),
        "LTX": (layouts.ltx, {"video_coords": places(3, 4).T[None].float()}),
    }


@pytest.mark.parametrize("name", calls())
def test_a_second_step_reads_nothing_and_a_change_is_seen(name: str) -> None:
    layout, call = calls()[name]
    call["hidden_states"] = torch.zeros(1, 12, 4)
    first = layout(MODEL, call)
    assert first.size[-2:] == (3, 4)
    with NoReads():
        assert layout(MODEL, call) == first
        assert layout(MODEL, {**call, "hidden_states": torch.ones(1, 12, 4)}) == first
    equal = {**call, **calls()[name][1]}
    changed = next(key for key in call if key in ("img_ids", "position_ids", "video_coords"))
    call[changed].copy_(call[changed].flip(0 if changed != "video_coords" else -1))
    with pytest.raises(AssertionError), NoReads():
        layout(MODEL, call)
    for model, given in (
        (MODEL, equal),  # but another object
        (nn.Identity(), call),
        (MODEL, {**call, "more": torch.ones(2)}),
    ):
        with pytest.raises(AssertionError), NoReads():
            layout(model, given)


def test_what_tells_no_grid_is_told() -> None:
    assert layouts.ltx(MODEL, {}) == "num_frames, height and width are not given"
    places = torch.randn(1, 3, 24, generator=torch.Generator().manual_seed(0))
    assert layouts.ltx(MODEL, {"video_coords": places}) == "video_coords are no grid"


def test_minimax_h3_merges_the_last_frames_that_follow_one_another() -> None:
    """The sequence has a reference of one frame, sound, and a video of two frames."""
    ids = torch.cat([places(2, 3), torch.zeros(4, 3).long(), places(2, 3, 0, 1), places(1, 1)])
    indices = torch.tensor([*range(6), *range(10, 22)])
    call = {"video_indices": indices, "position_ids": ids}
    assert layouts.minimax_h3(MODEL, call) == Tokens((2, 2, 3), before=10, after=1)


def test_samples_whose_images_lie_at_unlike_places_are_told() -> None:
    shapes = {"shape_list": [[(1, 3, 4)], [(1, 4, 3)]]}
    assert layouts.joyimage_edit_plus(None, shapes) == UNLIKE
    indicator = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]])
    ideogram = type("Ideogram4", (nn.Module,), {"__module__": __name__})()
    call = {"indicator": indicator, "position_ids": torch.zeros(2, 4, 3)}
    assert layouts.ideogram4(ideogram, call) == UNLIKE


def test_what_nothing_counts_is_read_each_time_and_nothing_is_kept_alive() -> None:
    seen: list[Tensor] = []

    @cached_by_tensor("t")
    def total(model: Any, call: Any) -> Any:
        seen.append(call["t"].clone())
        return int(call["t"].sum()) + len(call["rest"])

    def of(t: Tensor, more: int = 1) -> Any:
        return total(MODEL, {"t": t, "rest": torch.zeros(more)})

    with torch.inference_mode():
        t = torch.ones(3)
        assert (of(t), of(t)) == (4, 4)
    assert len(seen) == 2
    t = torch.ones(3)
    assert (of(t), of(t), of(t, 2)) == (4, 4, 5)
    assert len(seen) == 4
    t.add_(1)
    assert of(t) == 7
    for _ in range(3):  # the address of a freed tensor is used again
        del t
        t = torch.full((3,), 5.0)
        assert of(t) == 16


def test_a_model_and_its_controlnet_that_are_given_the_same_places_each_have_their_own() -> None:
    union = nn.Identity()
    union.union = True  # type: ignore[assignment]
    call = {"img_ids": places(4, 6), "encoder_hidden_states": torch.zeros(1, 7, 8)}
    for _ in range(2):
        assert layouts.packed(MODEL, call) == Tokens((4, 6), before=7)
        assert layouts.packed(union, call) == Tokens((4, 6), before=8)


def at(h: int, w: int, row: int = 0, column: int = 0) -> Tensor:
    """Return `places` of image 0, shifted by a row and a column."""
    return places(h, w) + torch.tensor([0, row, column])


# For each second part of `img_ids` with the image's number: the size that is read, the number of
# tokens after the image, and the references.
OF_ONE_NUMBER: dict[str, tuple[Tensor, Tokens]] = {
    "the same places": (at(4, 6), Tokens((4, 6), 7, 24, references=((4, 6),))),
    "another size": (at(2, 3), Tokens((4, 6), 7, 6, references=((2, 3),))),
    "beside it": (at(4, 6, 0, 6), Tokens((4, 6), 7, 24, references=((4, 6),))),
    "apart below": (at(4, 6, 5), Tokens((4, 6), 7, 24, references=((4, 6),))),
    "two": (torch.cat([at(4, 6), at(4, 6)]), Tokens((4, 6), 7, 48, references=((4, 6),) * 2)),
    # they equal the ids of one taller image
    "right below": (at(4, 6, 4), Tokens((8, 6), 7)),
    "a rest": (at(1, 3, 4), Tokens((27,), 7)),
}


@pytest.mark.parametrize(("other", "expected"), OF_ONE_NUMBER.values(), ids=OF_ONE_NUMBER)
def test_a_reference_with_the_number_of_the_image_is_told_apart_by_its_places(
    other: Tensor, expected: Tokens
) -> None:
    ids, text = torch.cat([places(4, 6), other]), torch.zeros(1, 7, 8)
    assert layouts.packed(MODEL, {"img_ids": ids, "encoder_hidden_states": text}) == expected
