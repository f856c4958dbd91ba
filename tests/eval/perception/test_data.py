"""Class folders, clips, labels, class names and templates: what is accepted and what is refused."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mame_sd.errors import UserError
from mame_sd.eval.perception.data import ImageSet, labelled, open_images
from mame_sd.eval.perception.encoders import LoadedEncoder, load_encoder
from mame_sd.eval.perception.heads import (
    Head,
    class_names,
    prompt_templates,
    text_head,
    unit,
)
from mame_sd.runs.model_files import ModelChoice
from tests.builders.classification import (
    CLASSES,
    draw_classes,
    save_classifier,
    save_text_model,
    save_timm,
)
from tests.builders.perception import SIDE
from tests.builders.timm_models import NEEDS_TIMM


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return draw_classes(tmp_path / "data")


def loaded(folder: Path) -> LoadedEncoder:
    return load_encoder(ModelChoice(model=str(folder), device="cpu"))


def test_class_folders_are_read_as_torchvision_reads_them(folder: Path) -> None:
    images = open_images(folder)
    assert images.classes == CLASSES
    assert images.labels is not None
    assert sorted(images.files) == sorted(f"{name}/{n}.png" for name in CLASSES for n in range(4))
    assert [CLASSES[n] for n in images.labels] == [file.split("/")[0] for file in images.files]
    assert images.files != tuple(sorted(images.files))  # classes mix in batches
    assert open_images(folder) == images
    assert open_images(folder, 5).files == images.files[:5]
    assert [len(batch) for batch in images.batches(5)] == [5, 5, 2]
    about = images.about()
    assert (about["images"], about["classes"]) == (12, 3)
    before = images.digest(images.files)
    (folder / "ant" / "0.png").write_bytes(b"other")
    assert open_images(folder).digest(images.files) != before


def test_bad_folders_are_named(folder: Path) -> None:
    def refused(place: Path, message: str, frames: int | None = None) -> None:
        with pytest.raises(UserError, match=message):
            open_images(place, frames=frames)

    refused(folder / "nothing", "expected a folder of class folders or of images, found none")
    refused(folder / "ant", "expected class folders of clips, found no folder in it", 4)
    shutil.copy(folder / "ant" / "0.png", folder / "loose.png")
    refused(folder, r"got both \('ant' next to 'loose.png'\)")
    (folder / "loose.png").unlink()
    refused(folder, "expected folders of frames in each", 4)
    (folder / "empty").mkdir()
    refused(folder, r"expected images .* in each class folder, found none in .*empty")


def test_labels_go_by_name_or_else_by_order(folder: Path) -> None:
    images = open_images(folder)
    own = images.labels
    assert own is not None
    by_name, how = labelled(images, {"cat": 0, "ant": 1, "bee_fly": 2, "dog": 3})
    assert how == "class folders by name"
    assert by_name.labels == tuple((1, 2, 0)[label] for label in own)
    by_order = labelled(images, {"x": 0, "y": 1, "z": 2})
    assert by_order == (images, "class folders in sorted order")
    for labels in ({"x": 0, "y": 1}, {"ant": 0, "y": 1, "z": 2}):
        with pytest.raises(UserError, match=r"named as the model's . classes, or just as many"):
            labelled(images, labels)


def test_class_names_and_templates(tmp_path: Path) -> None:
    assert class_names(None, CLASSES) == ["ant", "bee fly", "cat"]
    file = tmp_path / "names.txt"
    file.write_text("an ant\n\na bee\na cat\n")
    assert class_names(file, CLASSES) == class_names(file, []) == ["an ant", "a bee", "a cat"]
    plain: Any = SimpleNamespace(identity={"name": "vit"})
    assert prompt_templates(None, plain) == ["a photo of a {}."]
    embedded: Any = SimpleNamespace(identity={"name": "embedded-clip"})
    assert "{} on a light blue background" in prompt_templates(None, embedded)
    bad, blank = (tmp_path / name for name in ("bad", "blank"))
    bad.write_text("nothing\n")
    blank.write_text("\n")
    file.write_text("a {}\nmany {}s\n")
    assert prompt_templates(file, plain) == ["a {}", "many {}s"]
    refused: list[tuple[Any, str]] = [
        (lambda: class_names(file, CLASSES), "expected a line for each of 3 class folders, got 2"),
        (lambda: class_names(None, []), "expected a file of class names"),
        (lambda: class_names(tmp_path / "no", []), "can't be read"),
        (lambda: prompt_templates(bad, plain), "expected {} once in each line, got 'nothing'"),
        (lambda: prompt_templates(blank, plain), "expected lines of text, got none"),
    ]
    for call, message in refused:
        with pytest.raises(UserError, match=message):
            call()


@pytest.mark.parametrize("name", ["CLIPModel", "SiglipModel"])
@torch.no_grad()
def test_zero_shot_is_that_of_one_prompt_at_a_time(tmp_path: Path, folder: Path, name: str) -> None:
    encoder = loaded(save_text_model(tmp_path / "model", name))
    names, templates = ["ant", "bee fly"], ["a {}", "two {}s on a wall"]
    head = text_head(encoder, names, templates)
    padding = {"padding": "max_length", "max_length": 64} if name == "SiglipModel" else {}
    for number, one in enumerate(names):
        vectors = []
        for template in templates:
            tokens = encoder.tokenizer(template.format(one), return_tensors="pt", **padding)
            features = encoder.model.get_text_features(input_ids=tokens["input_ids"])
            vectors.append(unit(features)[0])
        mean = sum(vectors) / 2
        assert head.vectors is not None
        torch.testing.assert_close(head.vectors[number], mean / mean.norm(), rtol=1e-4, atol=1e-5)
    images = open_images(folder)
    inputs = encoder.inputs(images.load(range(3)))
    got, text = head.logits(inputs), head.vectors
    both = encoder.model(
        **inputs, input_ids=encoder.tokenizer(["x"], return_tensors="pt", **padding)["input_ids"]
    )
    torch.testing.assert_close(
        got, both.image_embeds / both.image_embeds.norm(dim=-1, keepdim=True) @ text.T
    )


def test_models_that_cannot_be_loaded_are_refused_in_one_line(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "vit")
    encoder = loaded(folder)
    assert encoder.labels == {name: n for n, name in enumerate(CLASSES)}
    assert encoder.identity["class"] == "ViTForImageClassification"
    for change, match in (
        (
            lambda: (folder / "preprocessor_config.json").unlink(),
            "preprocessor_config.json .and a tokenizer .* got OSError",
        ),
        (
            lambda: (folder / "config.json").unlink(),
            "names its class in architectures, and .* got FileNotFoundError",
        ),
    ):
        change()
        with pytest.raises(UserError, match=match):
            loaded(folder)
    with pytest.raises(UserError, match="expected a folder or a hub id"):
        loaded(tmp_path / "nothing")
    with pytest.raises(
        UserError, match="--model embedded-none: expected the name of an embedded model"
    ):
        load_encoder(ModelChoice(model="embedded-none"))


@NEEDS_TIMM
def test_a_model_of_timm_answers_as_by_hand(tmp_path: Path, folder: Path) -> None:
    model = save_timm(tmp_path / "model")
    encoder, images = loaded(tmp_path / "model"), open_images(folder)
    assert encoder.identity["class"] == "VisionTransformer"
    assert labelled(images, encoder.labels)[0] == images
    inputs = encoder.inputs(images.load(range(2)))
    pictures = [Image.open(folder / images.files[n]).convert("RGB") for n in range(2)]
    edge = math.floor(SIDE / 0.9)
    cut = (edge - SIDE) // 2
    for seen, picture in zip(inputs["pixel_values"], pictures, strict=True):
        near = picture.resize((edge, edge), Image.Resampling.BICUBIC)
        near = near.crop((cut, cut, cut + SIDE, cut + SIDE))
        want = torch.from_numpy(np.array(near)).permute(2, 0, 1) / 255
        torch.testing.assert_close(seen, (want - 0.5) / 0.25, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        assert torch.equal(Head(encoder).logits(inputs), model(inputs["pixel_values"]))
    with pytest.raises(UserError, match=r"--model timm/no\.model: expected a folder, or"):
        load_encoder(ModelChoice(model="no.model", offline=True))


def write_frames(folder: Path, values: list[int], side: int = 64) -> None:
    """Frames of one grey each, which says its number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, value in enumerate(values):
        Image.new("RGB", (side, side), (value,) * 3).save(folder / f"{number}.png")


def seen(clips: ImageSet, name: str) -> np.ndarray:
    return clips.load([clips.files.index(name)])[0]


def test_frames_are_evenly_spaced_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    write_frames(tmp_path / "a" / "long", [*range(0, 240, 20)])  # 10.png comes after 9.png
    write_frames(tmp_path / "b" / "short", [30, 90])
    clips = open_images(tmp_path, frames=4)
    assert clips.classes == ("a", "b")
    assert seen(clips, "a/long")[:, 0, 0, 0].tolist() == [0, 80, 140, 220]
    assert seen(clips, "b/short")[:, 0, 0, 0].tolist() == [30, 30, 90, 90]


def test_clips_that_can_not_be_read_are_named(tmp_path: Path) -> None:
    clip = tmp_path / "a" / "one"
    write_frames(clip, [10, 50, 90, 130])
    clips = open_images(tmp_path, frames=4)
    write_frames(clip, [10], side=32)
    with pytest.raises(
        UserError, match=r"expected frames of one size in .*one, got 32 x 32 and 64"
    ):
        clips.load([0])
    write_frames(clip, [10] * 4, side=1)
    with pytest.raises(UserError, match="one of 1 x 1"):
        clips.load([0])
    for one in clip.iterdir():
        one.unlink()
    with pytest.raises(UserError, match="expected frames"):
        clips.load([0])
