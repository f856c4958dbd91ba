"""The CLIP score against the model itself; prompts that are cut; weights."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchmetrics.multimodal.clip_score import CLIPScore
from transformers import CLIPImageProcessorPil, CLIPModel, CLIPProcessor, CLIPTokenizer

from mame_sd.embedded import model as subjects
from mame_sd.errors import UserError
from mame_sd.eval.metrics.clip import PUBLISHED, Clip, clip_score, load_clip
from tests.builders import seeded
from tests.builders.metrics import pictures
from tests.builders.tiny import save_tiny_clip


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_clip(tmp_path_factory.mktemp("weights") / "clip-vit-base-patch32")


@pytest.fixture(scope="module")
def clip(clip_folder: Path) -> Clip:
    return load_clip(clip_folder)


PROMPTS = ["a red key on a table", "an owl"]


def test_the_embedded_clip_goes_by_name(
    clip: Clip, clip_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects, "models_folder", lambda: tmp_path)
    with pytest.raises(
        UserError, match=r"--clip embedded-clip: this installation has no embedded CLIP"
    ):
        load_clip("embedded-clip")
    shutil.copytree(clip_folder, tmp_path / "clip")
    found = load_clip("embedded-clip")
    assert (found.name, found.weights_hash) == ("CLIP embedded-clip", clip.weights_hash)


def test_clip_score_is_the_models_own_logit_without_its_scale(
    clip: Clip, clip_folder: Path
) -> None:
    model = CLIPModel.from_pretrained(clip_folder).eval()
    pictures = [seeded.picture(f"clip {i}", 50, 70) for i in range(2)]
    pixels = CLIPImageProcessorPil.from_pretrained(clip_folder)(
        [Image.fromarray(x) for x in pictures], return_tensors="pt"
    )
    tokens = CLIPTokenizer.from_pretrained(clip_folder)(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**tokens, **pixels).logits_per_image / model.logit_scale.exp()
    images = torch.stack([torch.from_numpy(x).permute(2, 0, 1).float() / 255 for x in pictures])
    expected = (100 * logits.diagonal()).tolist()
    assert clip_score(clip, images, PROMPTS).tolist() == pytest.approx(expected, abs=1e-4)


def test_long_prompts_are_cut_and_still_differ(clip: Clip) -> None:
    image = pictures(1, 40, 40).expand(3, 3, 40, 40)
    same_start = "a" * 76  # one token a character, so the last of them is cut
    prompts = [same_start + "b", same_start + "c", "b" * 80]
    scores = clip_score(clip, image, prompts)
    assert scores[0] == pytest.approx(scores[1].item(), abs=1e-9)
    assert abs(scores[0] - scores[2]) > 1e-3


def test_torchmetrics_still_fails_with_transformers_5(clip_folder: Path) -> None:
    """If this test fails, torchmetrics' CLIPScore may replace our code."""
    kinds = (CLIPModel, CLIPProcessor)
    score = CLIPScore(lambda: tuple(kind.from_pretrained(clip_folder) for kind in kinds))
    with pytest.raises(AttributeError, match="no attribute 'norm'"):
        score.update(torch.zeros(1, 3, 40, 40, dtype=torch.uint8), PROMPTS[:1])


def test_a_published_clip_comes_from_the_hub_at_a_fixed_revision(
    clip: Clip, clip_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="fetch it once without --offline"):
        load_clip("clip-vit-b-32", offline=True)
    for _, revision, _ in PUBLISHED.values():
        assert re.fullmatch("[0-9a-f]{40}", revision)
    monkeypatch.setitem(PUBLISHED, "clip-vit-b-32", (str(clip_folder), "main", False))
    loaded = load_clip("clip-vit-b-32")
    assert (loaded.name, loaded.weights_hash) == ("CLIP clip-vit-b-32", clip.weights_hash)
