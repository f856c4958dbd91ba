"""The embedded model's ground truth and the prompts drawn of it."""

from __future__ import annotations

import pytest

from mame_sd.errors import UserError
from mame_sd.eval.scoring.reference import rendered_glyphs
from mame_sd.eval.scoring.retrieval import (
    background_right,
    draw_prompts,
    rendered,
    retrieved,
    subject_of,
    subjects_by_caption,
)


def test_the_embedded_models_truth_is_found() -> None:
    captions = list(subjects_by_caption())
    assert len(captions) == rendered_glyphs().count == 180 * 12
    index = captions.index("key on a black background")
    assert subject_of(captions[index]) == ("key", "black")
    image = rendered(index)
    assert image.shape == (256, 256, 3)
    assert retrieved(image, "key on a black background") == 1
    assert retrieved(image, "pizza on a black background") == 0
    assert background_right(image, "pizza on a black background") == 1
    assert background_right(image, "key on a white background") == 0


def test_drawn_prompts_are_half_unseen_and_always_the_same() -> None:
    prompts = draw_prompts(128)
    assert prompts == draw_prompts(128)
    assert len({prompt.text for prompt in prompts}) == 128
    assert sum(prompt.extra["held_out"] for prompt in prompts) == 64
    assert all(prompt.text in subjects_by_caption() for prompt in prompts)
    assert len({prompt.text for prompt in draw_prompts(651)}) == 651
    with pytest.raises(UserError, match="--num: expected at most 651 drawn prompts, got 652"):
        draw_prompts(652)
