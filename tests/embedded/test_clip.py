"""The embedded CLIP: able to tell what it was made to tell, merged too."""

from typing import Any

import numpy as np
import pytest
import torch

from mame_sd.embedded import model as subjects
from mame_sd.eval.metrics.clip import load_clip
from mame_sd.eval.perception.encoders import load_encoder
from mame_sd.eval.perception.heads import Head, prompt_templates, text_head
from mame_sd.eval.perception.rivals import rival_on
from mame_sd.eval.perception.rules import RandomDrop
from mame_sd.perception.apply_encoder import apply_encoder
from mame_sd.runs.model_files import ModelChoice
from scripts.training import pictures


@pytest.fixture(scope="module")
def head() -> Head:
    encoder = load_encoder(ModelChoice(device="cpu"))
    with torch.no_grad():
        return text_head(encoder, subjects.glyph_names(), prompt_templates(None, encoder))


def held_out(seed: int, count: int, **how: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """Held-out pictures and the numbers of their glyphs."""
    names, rngs = subjects.glyph_names(), (pictures.rng_of(seed, "test", n) for n in range(count))
    made = [pictures.draw(rng, names, held_out=True, **how) for rng in rngs]
    return [pixels for pixels, _ in made], np.array([scene.subject.glyph for _, scene in made])


@torch.no_grad()
@pytest.mark.training
@pytest.mark.parametrize("how", [{}, {"crowd": pictures.CROWD}], ids=["plain", "crowded"])
def test_it_tells_glyphs_apart_merged_too_and_not_by_few_patches(
    head: Head, how: dict[str, Any]
) -> None:
    model, (images, labels) = head.encoder.model, held_out(2, 24, **how)

    def told(images: list[np.ndarray]) -> np.ndarray:
        return head.logits(head.encoder.inputs(images)).argmax(1).numpy()

    plain = told(images)
    assert (plain == labels).mean() > 0.7
    rng = np.random.default_rng(0)
    shuffled = [rng.permutation(image.reshape(-1, 3)).reshape(image.shape) for image in images]
    assert (told(shuffled) == labels).mean() < 0.2
    with rival_on(model, RandomDrop(0.67)):  # in twelve blocks: two patches are left
        dropped = told(images)
    with apply_encoder(model) as handle:
        merged = told(images)
        assert handle.report().share < 0.6
    assert (dropped == plain).mean() < 0.6 < 0.85 < (merged == plain).mean()


@torch.no_grad()
def test_clip_score_is_higher_for_the_prompt_of_the_image_than_for_another() -> None:
    clip = load_clip("embedded-clip")
    names = ["rocket", "pizza", "owl", "key"]
    prompts = [subjects.caption(name, "white") for name in names]
    images = [np.asarray(subjects.render(name, "white").convert("RGB")) for name in names]
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
    table = clip.image_features(pixels) @ clip.text_features(prompts).T
    assert table.argmax(1).tolist() == [0, 1, 2, 3]
