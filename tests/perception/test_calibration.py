"""Settings of single blocks, and calibration, which finds them.

Errors are those of merging, the choice is the best there is, and files give the same again.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mame_sd import MaMeConfig, apply_mame
from mame_sd.perception.apply_encoder import apply_encoder
from mame_sd.perception.calibration import SHARES, Measured
from tests.builders.perception import DEPTH, PATCHES, ROWS, Row, tokens

VIT = next(row for row in ROWS if row.name == "ViTForImageClassification")
CLIP = next(row for row in ROWS if row.name.startswith("CLIPForImage"))


def names(model: Any) -> list[str]:
    return [block.name for block in apply_encoder(model).report().blocks]


@pytest.mark.parametrize("row", [VIT, CLIP], ids=lambda row: row.name)
@torch.no_grad()
def test_rules_are_the_same_as_blocks_and_shares(row: Row) -> None:
    model, inputs = row.build(), row.batch(2)
    one, two = names(model)[1::2]
    handle = apply_encoder(model, keep=(0.7, 0.6), blocks=(1, 3))
    expected, kept = row.call(model, inputs)["logits"], tokens(handle)
    rules = {"*": False, one: {"keep": 0.7}, two: {"keep": 0.6}}
    handle = apply_mame(model, layers=rules)
    assert torch.equal(row.call(model, inputs)["logits"], expected)
    assert tokens(handle) == kept
    assert [block.merged for block in handle.report().blocks] == [False, True] * (DEPTH // 2)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(row.call(compiled, inputs)["logits"], expected)
    apply_encoder(model, keep=0.6, layers={names(model)[0]: False})
    assert not torch.equal(row.call(model, inputs)["logits"], expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"layers": {"blocks.77": False}},
            r"layers: expected patterns of blocks such as .*'blocks.77'",
        ),
        ({"layers": {"*": {"keep": 7}}}, r"layers: .*keep: expected a share"),
        ({"layers": {"*": {"kep": 0.5}}}, r"layers: .*unknown setting 'kep'; did you mean 'keep'"),
        ({"layers": {"*": {"tile_size": 8}}}, r"tile_size: expected none for a vision transformer"),
        ({"layers": {"*": False}}, r"layers: expected a block that merges, got none"),
        ({"made_for": "Other with 3 blocks"}, r"made_for: .* found for ViTModel with .* for Other"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_can_not_be_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    model = VIT.build()
    handle = apply_mame(model)
    with pytest.raises(ValueError, match=message) as caught:
        apply_mame(model, MaMeConfig(), **fields)
    assert "\n" not in str(caught.value)
    assert handle.installed
    with pytest.raises(ValueError, match=r"layers: .*give it to apply_mame"):
        handle.set(layers={"*": False})


@torch.no_grad()
def test_a_model_is_calibrated_and_its_file_gives_the_same(tmp_path: Path) -> None:
    model, inputs = VIT.build(), VIT.batch(3)
    (images,) = inputs.values()
    whole = VIT.call(model, inputs)["logits"]
    handle: Any = apply_mame(model)
    found = handle.calibrate(images, flops=0.8)
    for number, place in ((0, 3), (2, 1)):
        apply_encoder(model, keep=SHARES[place], blocks=(number,))
        merged = VIT.call(model, inputs)["logits"]
        apart = float((merged - whole).square().sum() / whole.square().sum())
        assert found.errors[number][place] == pytest.approx(apart, rel=1e-4)
    handle.install()
    assert handle.config.keep is not None
    expected = VIT.call(model, inputs)["logits"]
    assert handle.report().share == pytest.approx(found.flops(found.choose(0.8)), abs=0.04)
    assert handle.report().share <= 0.81
    file = tmp_path / "blocks.json"
    found.save(file, flops=0.8)
    again = apply_mame(model, file)
    assert torch.equal(VIT.call(model, inputs)["logits"], expected)
    assert "FLOPs" in found.table(0.8)
    assert again.report().share < 1
    with pytest.raises(ValueError, match=r"made_for: .* found for CLIP"):
        apply_mame(CLIP.build(), file)
    for bad, message in (({"flops": 1.5}, "flops: expected a share"), ({"flops": 0.01}, "larger")):
        with pytest.raises(ValueError, match=message):
            again.calibrate(images, **bad)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="expected a few images, got none"):
        again.calibrate(images[:0], flops=0.8)  # type: ignore[union-attr]
    assert again.installed


def test_the_choice_is_the_best_of_all() -> None:
    model = VIT.build()
    handle: Any = apply_mame(model)
    found: Measured = handle.calibrate(VIT.batch(1)["pixel_values"], flops=0.8)
    found = replace(found, names=found.names[:3], costs=found.costs[:3], patches=8)
    rng = torch.Generator().manual_seed(0)
    for _ in range(3):
        rows = torch.rand(3, len(SHARES), generator=rng).sort(1).values.tolist()
        one = replace(found, errors=tuple(map(tuple, rows)))
        courses = [
            course
            for course in itertools.product(range(1, 9), repeat=3)
            if all(b <= a <= 2 * b for a, b in itertools.pairwise((8, *course)))
        ]
        for flops in (0.7, 0.8):
            best = min(one.error(c) for c in courses if one.flops(c) <= flops - 0.004)
            chosen = one.choose(flops)
            assert one.flops(chosen) <= flops
            assert one.error(chosen) <= best + 1e-9
    assert PATCHES >= 8
