"""The CLIP's training resumes where it was stopped, runs through, and writes what transformers and
`classify` read.

The transformer's tests kill a run, and see that the resumed one gives the very weights of an
undisturbed one. Both scripts train in `scripts.training.loop`.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mame_sd.embedded import model as subjects
from mame_sd.eval.perception.data import open_images
from mame_sd.eval.perception.encoders import load_encoder
from mame_sd.eval.perception.heads import text_head, unit
from mame_sd.perception.apply_encoder import apply_encoder
from mame_sd.runs.model_files import ModelChoice
from scripts.training import contrast, joint, pictures, train_clip, world
from tests.builders.trainings import smoke, stopped


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that was stopped once, and resumed."""
    work = tmp_path_factory.mktemp("clip")
    stopped(train_clip, work, "tokens256")
    done = (work / "tokens64.pt").stat().st_mtime_ns
    assert not (work / "model").exists()
    smoke(train_clip, work)
    assert (work / "tokens64.pt").stat().st_mtime_ns == done
    return work


@torch.no_grad()
@pytest.mark.training
def test_what_is_written_is_a_small_clip_that_merges_and_reads_the_pictures(whole: Path) -> None:
    assert sum(file.stat().st_size for file in (whole / "model").iterdir()) < 25e6
    encoder = load_encoder(ModelChoice(model=str(whole / "model"), device="cpu"))
    vision = encoder.model.config.vision_config
    assert (vision.num_hidden_layers, vision.image_size // vision.patch_size) == (12, 16)
    images = open_images(whole / "pictures")
    assert (len(images.classes), len(images.files)) == (6, 12)
    pixels = np.asarray(Image.open(whole / "pictures" / images.files[0]))
    made = encoder.inputs([pixels])["pixel_values"]
    torch.testing.assert_close(made, contrast.prepared([pixels], 256), rtol=0, atol=1e-5)
    handle = apply_encoder(encoder.model, keep=[0.5] * 3, blocks=(3, 6, 9))
    head = text_head(encoder, images.classes, ["{} on a white background"])
    assert head.logits({"pixel_values": made}).shape == (1, 6)
    assert [block.tokens_kept for block in handle.report().blocks][::3] == [257, 129, 65, 33]
    ids = contrast_tokens(["rocket on a white background"])
    torch.testing.assert_close(
        head.text[list(images.classes).index("rocket")],
        unit(encoder.model.get_text_features(ids))[0],
    )


def contrast_tokens(texts: list[str]) -> torch.Tensor:
    rows: torch.Tensor = joint.joint_tokenizer()(
        texts, padding="max_length", return_tensors="pt"
    ).input_ids
    return rows


def test_pictures_follow_from_their_number_and_keep_what_is_held_out() -> None:
    names = subjects.glyph_names()
    seen = set()
    for index in range(12):
        (one, scene), (two, _) = (
            pictures.draw(pictures.rng_of(0, "x", index), names) for _ in range(2)
        )
        assert np.array_equal(one, two)
        assert (one.shape, one.dtype) == ((256, 256, 3), np.uint8)
        assert not scene.held_out
        assert pictures.draw(pictures.rng_of(0, "x", index), names, held_out=True)[1].held_out
        seen.add(scene.placed[0].glyph)
    assert len(seen) > 8
    assert any(names[glyph] not in world.SUBJECTS for glyph in seen)


def test_a_crowded_picture_has_pieces_of_others_strewn_over_a_large_glyph() -> None:
    names = subjects.glyph_names()
    for index in range(3):
        made = [
            pictures.draw(pictures.rng_of(0, "crowd", index), names, crowd=(80, 83))
            for _ in range(2)
        ]
        assert np.array_equal(made[0][0], made[1][0])
        scene = made[0][1]
        (placed,) = scene.placed
        assert placed.size >= 0.6
        assert 80 <= len(scene.pieces) <= 83
        assert all(piece.glyph != placed.glyph for piece in scene.pieces)
        assert scene.caption == subjects.caption(names[placed.glyph], scene.ground.phrase)


@pytest.mark.training
def test_a_stage_that_leaves_the_text_as_it_is_names_every_glyph(whole: Path) -> None:
    names = subjects.glyph_names()[:6]
    stage = contrast.Stage("s", 256, 5, 4, 0, 0.0, grounds=2, crowd=9, ramp=4, locked=True)
    assert [stage.crowd_at(step) for step in range(5)] == [(0, 2), (0, 4), (0, 7), (0, 9), (0, 9)]
    assert contrast.Stage("s", 256, 5, 4, 0, 0.0).crowd_at(3) is None
    _, captions, others = contrast.draw_batch(names, stage, 0, 0)
    grounds = {
        text.split(" on a")[1].removeprefix("n").strip().removesuffix(" background")
        for text in others
    }
    wanted = {
        subjects.caption(n, g) for n in names for g in grounds if not subjects.is_held_out(n, g)
    }
    assert len(grounds) == 2
    assert {*captions, *others} == wanted
    assert not {*captions} & {*others}
    before, after = (
        torch.load(whole / f"{name}.pt", weights_only=True)["ema"]
        for name in ("tokens256", "crowd256")
    )
    same = {name: torch.equal(before[name], after[name]) for name in before}
    assert all(same[name] for name in same if name.startswith(("text_model", "text_projection")))
    assert not all(same.values())


@torch.no_grad()
def test_a_finer_model_starts_as_the_coarse_one() -> None:
    tokenizer = joint.joint_tokenizer()
    coarse, fine = (
        contrast.new_model(contrast.Stage("s", side, 1, 1, 0, 0.0), tokenizer).eval()
        for side in (128, 256)
    )
    contrast.grow(coarse, fine)
    one, two = coarse.state_dict(), fine.state_dict()
    key = "vision_model.embeddings.position_embedding.weight"
    assert all(
        torch.equal(one[name], two[name]) for name in one if one[name].shape == two[name].shape
    )
    assert torch.equal(one[key][0], two[key][0])
    grid = two[key][1:].unflatten(0, (16, 16))
    centre = grid[7:9, 7:9].mean((0, 1))
    torch.testing.assert_close(
        centre, one[key][1:].unflatten(0, (8, 8))[3:5, 3:5].mean((0, 1)), rtol=1e-4, atol=1e-6
    )


def test_batches_have_few_grounds() -> None:
    stage, names = contrast.Stage("s", 128, 5, 6, 8, 0.0, grounds=2), subjects.glyph_names()
    _, captions, others = contrast.draw_batch(names, stage, 0, 3)
    assert len({text.split(" on a")[1] for text in [*captions, *others]}) == 2


@torch.no_grad()
def test_the_loss_is_clip_s_where_captions_differ() -> None:
    tokenizer = joint.joint_tokenizer()
    stage = contrast.Stage("s", 128, 1, 4, 0, 0.0)
    model, names = contrast.new_model(stage, tokenizer).eval(), subjects.glyph_names()
    tokens = {
        text: contrast_tokens([text])[0] for text in contrast.draw_batch(names, stage, 0, 0)[1]
    }
    assert len(tokens) == 4
    images, captions, _ = batch = contrast.draw_batch(names, stage, 0, 0)
    ids = torch.stack([tokens[text] for text in captions])
    wanted = model(
        input_ids=ids, pixel_values=contrast.prepared(images, 128), return_loss=True
    ).loss
    got = contrast.contrastive_loss(model, tokens, stage, batch)
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)  # bfloat16
