"""Rows of the caption table on a tiny LLaVA, through the model's own calls."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPImageProcessor, LlavaProcessor

from mame_sd import apply_mame
from mame_sd.captions.captioner_registry import images_of
from mame_sd.errors import UserError
from mame_sd.eval.captions.model import Captioner, load_captioner
from mame_sd.eval.captions.references import SCORES, language_scores, read_references
from mame_sd.eval.captions.rows import ROWS, chosen, chosen_rows, divprune
from mame_sd.eval.captions.run import (
    FORMAT,
    caption_pictures,
    figures_of,
    run_caption,
    table,
)
from mame_sd.eval.captions.settings import CaptionSettings
from mame_sd.eval.perception.rivals import rival_on
from mame_sd.eval.perception.rules import ToMe
from mame_sd.eval.runner import Store
from mame_sd.runs.model_files import ModelChoice
from tests.builders.tokens import word_tokenizer
from tests.captions import tiny

PATCHES = tiny.GRID**2


def call() -> dict[str, Tensor]:
    return {**tiny.prompts([[PATCHES]]), "pixel_values": tiny.pictures(1)}


def test_every_row_writes_with_so_many_tokens_and_leaves_the_model_as_it_was() -> None:
    model, inputs = tiny.llava(), call()
    before = model(**inputs).logits
    visual = {}
    for name, row in ROWS.items():
        with row.method(model) as calls:
            logits = model(**inputs).logits
            model.generate(**inputs, max_new_tokens=2, do_sample=False)
            visual[name] = calls.report().layers[0].tokens_kept
        if name == "baseline":
            assert torch.equal(logits, before)
        assert torch.equal(model(**inputs).logits, before), name
        assert not model.model.language_model._forward_pre_hooks
    assert visual.pop("tome") == 6
    assert 1 < visual.pop("plain-0.8") < PATCHES
    shares = {name: float(name.rpartition("-")[2]) for name in visual if name != "baseline"}
    assert visual == {"baseline": 36, **{name: round(36 * k) for name, k in shares.items()}}


def test_chosen_tokens_keep_their_places_and_their_order() -> None:
    model, inputs = tiny.llava(), call()
    (whole,) = images_of(model, inputs, 1.0)
    with chosen(lambda features, count: torch.tensor([5, 2]), 0.06, model) as calls:
        (image,) = calls.see(inputs)
    assert image.places.tolist() == [2, 5]
    assert torch.equal(image.features, whole.features[[2, 5]])
    assert image.unmerged == len(whole.features) == PATCHES


@torch.no_grad()
def in_tower_by_hand(model: Any, picture: Tensor, merging: Any) -> list[Tensor | None]:
    """Projected features of each patch's place, where the four blocks that are read merge."""
    with merging(model.model.vision_tower) as handle:
        handle.capture()
        states = model.model.vision_tower(picture[None], output_hidden_states=True).hidden_states[4]
        places = list(range(PATCHES + 1))
        for plan in [handle.plans()[number] for number in range(4)]:
            places = [places[row] for row in plan.kept.flatten().tolist()]
    assert states.shape[1] < PATCHES
    found = dict(zip(places, model.model.multi_modal_projector(states)[0], strict=True))
    return [found.get(place + 1) for place in range(PATCHES)]


IN_TOWER = {
    "tome": lambda tower: rival_on(tower, ToMe(8)),
    "plain-0.8": lambda tower: apply_mame(tower, tau=0.8, blocks=4),
}


@pytest.mark.parametrize("row", IN_TOWER)
def test_what_the_tower_leaves_keeps_its_places_or_is_counted_anew(row: str) -> None:
    model, inputs = (
        tiny.llava(),
        {**tiny.prompts([[PATCHES] * 2]), "pixel_values": tiny.pictures(2)},
    )
    with ROWS[row].method(model):
        found = model(**inputs).logits[0]
        output = model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    seen = [in_tower_by_hand(model, one, IN_TOWER[row]) for one in inputs["pixel_values"]]
    ids = inputs["input_ids"][0].tolist()
    if row == "plain-0.8":  # as a prompt that never had more image tokens
        given = iter([one for image in seen for one in image])
        ids = [one for one in ids if one != tiny.IMAGE or next(given) is not None]
        seen = [[one for one in image if one is not None] for image in seen]
    expected, words = tiny.logits_by_hand(model, ids, seen, 3)
    torch.testing.assert_close(found, expected[: len(found)], rtol=1e-3, atol=1e-4)
    assert output[0, -3:].tolist() == words


def test_divprune_takes_the_farthest_next() -> None:
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    assert divprune(x, 3).sort().values.tolist() == [*tiny.joined_by_hand(x, x, 0.25)]


def test_captions_are_scored_together() -> None:
    pytest.importorskip("pycocoevalcap")
    texts = ["a cat on red and an owl on blue", "a car on white", "a star on green, over brick"]
    references = {str(n): [text, f"{text} ground"] for n, text in enumerate(texts)}
    captions = {str(n): text for n, text in enumerate(texts)}
    own = language_scores(captions, references)
    assert own["BLEU-4"] == pytest.approx(1.0, abs=1e-3)
    turned = dict(zip(captions, [*texts[1:], texts[0]], strict=True))
    chance = language_scores(turned, references)
    assert all(chance[name] < 0.6 * own[name] for name in SCORES)


def run_of(folder: Path, rows: list[str]) -> dict[str, Any]:
    model = tiny.llava()

    def inputs(picture: Image.Image) -> dict[str, Tensor]:
        pixels = torch.from_numpy(np.asarray(picture, np.float32) / 255).permute(2, 0, 1)
        return {**tiny.prompts([[PATCHES]]), "pixel_values": pixels[None]}

    captioner = Captioner(model, inputs, lambda ids: " ".join(map(str, ids.tolist())))
    pictures = read_references(folder / "references.json", folder)
    store = Store(folder / "out.jsonl", FORMAT, "captions", {}, ("row", "picture"))
    caption_pictures(captioner, pictures, rows, 3, store, lambda text: None)
    return {"rows": figures_of(store.lines, pictures, rows)}


def test_a_run_continues(tmp_path: Path) -> None:
    pytest.importorskip("pycocoevalcap")
    rng = np.random.default_rng(0)
    images, captions = [], []
    for n in range(2):
        pixels = rng.integers(0, 255, (tiny.SIDE, tiny.SIDE, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{n}.png")
        images.append({"id": n, "file_name": f"{n}.png"})
        captions.append({"image_id": n, "caption": "a cat on red"})
    content = json.dumps({"images": images, "annotations": captions})
    (tmp_path / "references.json").write_text(content)
    found = run_of(tmp_path, ["baseline"])
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line["first"] = line["whole"] = 1e6  # a slow minute
    torn = ["".join(json.dumps(line) + "\n" for line in lines), '{"row": "ba']
    (tmp_path / "out.jsonl").write_text("".join(torn))
    again = run_of(tmp_path, ["baseline", "keep-0.25", "divprune-0.25"])
    own, other = (row["kl"] for row in again["rows"][1:3])
    assert again["rows"][1]["kl_over"]["mean"] == pytest.approx(own - other)
    assert "MaMe, keep 0.25: KL less DivPrune's" in table(again)
    assert again["rows"][0]["first_share"] == found["rows"][0]["first_share"]
    assert again["rows"][1]["whole_share"] > 1e-3, (
        "the baseline is timed next to a row that is added"
    )
    assert again["rows"][1]["visual"] == 9
    low, high = again["rows"][1]["kl_interval"]
    assert 0 < low <= again["rows"][1]["kl"] <= high
    Image.new("RGB", (1, 1)).save(tmp_path / "1.png")
    with pytest.raises(UserError, match=r"1\.png of 1 x 1; take it out"):
        run_of(tmp_path, ["baseline", "random-0.25"])
    (tmp_path / "1.png").unlink()
    with pytest.raises(UserError, match=r"expected the picture 1\.png, found none"):
        run_of(tmp_path, ["baseline"])
    with pytest.raises(UserError, match="--rows: expected names of baseline"):
        chosen_rows("nothing")


def written(folder: Path, images: Any, annotations: Any = None) -> Path:
    """Write references of one picture that exists."""
    folder.mkdir(exist_ok=True)
    Image.new("RGB", (tiny.SIDE, tiny.SIDE)).save(folder / "0.png")
    captions = [{"image_id": 0, "caption": "a cat"}] if annotations is None else annotations
    content = {"images": images, "annotations": captions}
    (folder / "references.json").write_text(json.dumps(content))
    return folder / "references.json"


def settings_of(references: Path, **more: Any) -> CaptionSettings:
    return CaptionSettings(data=references.parent, references=references, **more)


ONE = [{"id": 0, "file_name": "0.png"}]


def test_what_is_wrong_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    good = written(tmp_path, ONE)
    out = tmp_path / "out"

    def run(references: Path = good, out: Path = out, **model: Any) -> None:
        choice = ModelChoice(**{"model": "nobody/nothing", "offline": True, **model})
        run_caption(settings_of(references, out=out), choice, print)

    deep, other = tmp_path / "deep.json", tmp_path / "other"
    deep.write_text("[" * 5000)
    other.mkdir()
    Store(other / "captions.jsonl", FORMAT, "captions", {}, ("row",)).add(
        {"row": "a", "picture": 0}
    )
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"references": written(tmp_path / "no", ONE, [])}, "found none of 0"),
        ({"references": deep}, "expected COCO's format"),
        ({"out": other}, "expected results of the same settings"),
        ({"device": "cuda:99"}, "--device cuda:99: expected auto or a device of this machine"),
        ({}, "--model: expected a LLaVA of transformers"),
    ]
    for given, message in wrong:
        with pytest.raises(UserError, match=re.escape(message)) as told:
            run(**given)
        assert "\n" not in str(told.value)


def test_dtype_acts_on_a_published_form(tmp_path: Path) -> None:
    pytest.importorskip("pycocoevalcap")
    words = ["<pad>", "<image>", "<unk>", *(f"w{n}" for n in range(3, 60))]
    special = {"pad_token": "<pad>", "additional_special_tokens": ["<image>"]}
    crop = {"height": tiny.SIDE, "width": tiny.SIDE}
    how = {"patch_size": tiny.PATCH, "num_additional_image_tokens": 1}
    LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": tiny.SIDE}, crop_size=crop),
        word_tokenizer(words, **special),
        vision_feature_select_strategy="default",
        **how,
    ).save_pretrained(tmp_path / "model")
    model = tiny.llava()
    model.config.image_token_id = 1
    model.save_pretrained(tmp_path / "model")
    found = {}
    for dtype in ("auto", "bfloat16"):
        choice = ModelChoice(model=str(tmp_path / "model"), device="cpu", dtype=dtype)
        captioner = load_captioner(choice)
        call = captioner.call(Image.new("RGB", (40, 30)))
        found[dtype] = (captioner.model.dtype, call["pixel_values"].dtype)
        references, out = written(tmp_path, ONE), tmp_path / dtype
        settings = settings_of(
            references, rows="keep-0.25,divprune-0.25,plain-0.8", tokens=3, out=out
        )
        said = table(run_caption(settings, choice, print))
        assert "paper's form" in said
        assert "KL less DivPrune's" in said
        head = json.loads((out / "captions.jsonl").read_text().splitlines()[0])
        assert head["about"]["dtype"] == str(captioner.model.dtype).removeprefix("torch.")
    assert found == {"auto": (torch.float32,) * 2, "bfloat16": (torch.bfloat16,) * 2}
