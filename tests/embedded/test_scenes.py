"""The transformer's truth: a subject is found wherever it stands, on every kind of ground."""

import numpy as np
import pytest
from PIL import Image

from mame_sd.embedded import model as subjects
from mame_sd.embedded.scenes import SUBJECTS, TEXTURES, color_of, nearest_subject
from mame_sd.eval.scoring.retrieval import TRUTHS
from scripts.training import world


def test_every_subject_is_a_glyph() -> None:
    assert set(SUBJECTS) < set(subjects.glyph_names())


@pytest.mark.parametrize("texture", TEXTURES)
def test_scenes_are_told_apart_wherever_their_subject_stands(texture: str) -> None:
    rng = np.random.default_rng(TEXTURES.index(texture))
    found = 0
    while found < 4:
        scene = world.draw_scene(rng, len(SUBJECTS))
        if scene.ground.texture != texture:
            continue
        found += 1
        image = Image.fromarray(world.render(scene))
        name = subjects.glyph_names()[scene.subject.glyph]
        assert nearest_subject(image, scene.ground.phrase) == name
        assert nearest_subject(image.resize((128, 128)), scene.ground.phrase) == name
        assert TRUTHS["transformer"].retrieved(np.asarray(image), scene.caption) == 1.0


def test_a_picture_without_its_subject_is_not_retrieved() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for name in SUBJECTS[:10]:
        noise = Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8))
        hits += nearest_subject(noise, "gray") == name
    assert hits <= 2


def test_a_ground_names_its_colour() -> None:
    assert [color_of(g) for g in ("light blue", "light blue brick", "red striped")] == [
        "light blue",
        "light blue",
        "red",
    ]
