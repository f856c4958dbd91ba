"""The embedded CLIP: small, documented, and able to tell what it was made to tell, merged too."""

import numpy as np
import pytest
import torch
from safetensors import safe_open

from mame_sd.embedded import model as subjects
from mame_sd.eval.metrics.clip import load_clip
from mame_sd.eval.perception.encoders import load_encoder
from mame_sd.eval.perception.heads import Head, prompt_templates, text_head
from mame_sd.eval.perception.rivals import rival_on
from mame_sd.eval.perception.rules import RandomDrop
from mame_sd.perception.apply_encoder import apply_encoder, encoder_restored
from mame_sd.runs.model_files import ModelChoice
from scripts.training import pictures

PICTURES = 36


@pytest.fixture(scope="module")
def head() -> Head:
    encoder = load_encoder(ModelChoice(device="cpu"))
    assert encoder.embedded
    with torch.no_grad():
        return text_head(encoder, subjects.glyph_names(), prompt_templates(None, encoder))


@pytest.fixture(scope="module")
def seen() -> tuple[list[np.ndarray], np.ndarray]:
    """Held-out pictures and the numbers of their glyphs."""
    names = subjects.glyph_names()
    made = [
        pictures.draw(pictures.rng_of(1, "test", n), names, held_out=True) for n in range(PICTURES)
    ]
    return [pixels for pixels, _ in made], np.array([scene.subject.glyph for _, scene in made])


def test_the_folder_is_documented_and_small() -> None:
    folder = subjects.embedded_model_path("clip")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 25e6
    assert "Noto" in (folder / "README.md").read_text(encoding="utf-8")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {"script_sha256", "seed", "steps"} <= set(file.metadata())


@torch.no_grad()
@pytest.mark.training
def test_it_tells_glyphs_apart_and_nothing_without_their_places(
    head: Head, seen: tuple[list[np.ndarray], np.ndarray]
) -> None:
    images, labels = seen
    plain = head.logits(head.encoder.inputs(images)).argmax(1).numpy()
    assert (plain == labels).mean() > 0.7
    rng = np.random.default_rng(0)
    shuffled = [rng.permutation(image.reshape(-1, 3)).reshape(image.shape) for image in images]
    assert (head.logits(head.encoder.inputs(shuffled)).argmax(1).numpy() == labels).mean() < 0.2
    with encoder_restored(head.encoder.model):
        handle = apply_encoder(head.encoder.model)
        merged = head.logits(head.encoder.inputs(images)).argmax(1).numpy()
        assert handle.report().share < 0.6
    assert (merged == plain).mean() > 0.9


@torch.no_grad()
@pytest.mark.training
def test_it_reads_crowded_pictures_and_few_random_patches_do_not_do(head: Head) -> None:
    names = subjects.glyph_names()
    made = [
        pictures.draw(pictures.rng_of(2, "test", n), names, held_out=True, crowd=pictures.CROWD)
        for n in range(24)
    ]
    inputs = head.encoder.inputs([pixels for pixels, _ in made])
    labels = np.array([scene.subject.glyph for _, scene in made])
    plain = head.logits(inputs).argmax(1).numpy()
    assert (plain == labels).mean() > 0.7
    with rival_on(head.encoder.model, RandomDrop(0.67)):  # in twelve blocks: two patches are left
        dropped = head.logits(inputs).argmax(1).numpy()
    with encoder_restored(head.encoder.model):
        apply_encoder(head.encoder.model)
        merged = head.logits(inputs).argmax(1).numpy()
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
