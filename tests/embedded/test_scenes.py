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
def test_a_subject_is_found_wherever_it_stands(texture: str) -> None:
    rng = np.random.default_rng(TEXTURES.index(texture))
    while (scene := world.draw_scene(rng, len(SUBJECTS))).ground.texture != texture:
        pass
    image = world.render(scene)
    assert TRUTHS["transformer"].retrieved(image, scene.caption) == 1.0
    small = Image.fromarray(image).resize((128, 128))
    assert nearest_subject(small, scene.ground.phrase) == scene.name


def test_a_ground_names_its_colour() -> None:
    assert [color_of(g) for g in ("light blue", "light blue brick", "red striped")] == [
        "light blue",
        "light blue",
        "red",
    ]
