"""The embedded model's ground truth and the prompts drawn of it."""

from __future__ import annotations

import pytest

from mame_sd.embedded.scenes import SUBJECTS, scenes_by_caption
from mame_sd.errors import UserError
from mame_sd.eval.scoring.reference import rendered_glyphs
from mame_sd.eval.scoring.retrieval import TRUTHS, rendered, subjects_by_caption, truth_of

UNET, TRANSFORMER = TRUTHS["unet"], TRUTHS["transformer"]


def test_the_embedded_models_truth_is_found() -> None:
    captions = list(subjects_by_caption())
    assert len(captions) == rendered_glyphs().count == 180 * 12
    index = captions.index("key on a black background")
    assert UNET.of(captions[index]) == ("key", "black")
    image = rendered(index)
    assert image.shape == (256, 256, 3)
    assert UNET.retrieved(image, "key on a black background") == 1
    assert UNET.retrieved(image, "pizza on a black background") == 0
    assert UNET.background_right(image, "pizza on a black background") == 1
    assert UNET.background_right(image, "key on a white background") == 0


def test_drawn_prompts_are_half_unseen_always_the_same_and_none_of_the_first() -> None:
    prompts = UNET.draw(128)
    assert prompts == UNET.draw(128)
    assert len({prompt.text for prompt in prompts}) == 128
    assert sum(prompt.extra["held_out"] for prompt in prompts) == 64
    assert all(prompt.text in subjects_by_caption() for prompt in prompts)
    assert len({prompt.text for prompt in UNET.draw(651)}) == 651
    with pytest.raises(UserError, match="--num: expected at most 651 drawn prompts, got 652"):
        UNET.draw(652)
    first = {prompt.text for prompt in TRANSFORMER.draw(64)}
    second = TRANSFORMER.draw(64, 1, without=first)
    assert len({prompt.text for prompt in second}) == 64
    assert first.isdisjoint(prompt.text for prompt in second)
    assert sum(prompt.extra["held_out"] for prompt in second) == 32


def test_a_run_is_told_apart_by_its_models_name() -> None:
    assert truth_of({"name": "embedded-transformer"}) is TRANSFORMER
    assert truth_of({"name": "embedded"}) is truth_of({}) is UNET
    assert set(TRANSFORMER.captions()) == set(scenes_by_caption())
    assert TRANSFORMER.of("rocket on a light blue brick background") == (
        "rocket",
        "light blue brick",
    )
    assert len(SUBJECTS) * 12 * 4 == len(scenes_by_caption())
