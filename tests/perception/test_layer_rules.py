"""Settings of single blocks by patterns of their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mame_sd import MaMeConfig, apply_mame
from mame_sd.perception.apply_encoder import apply_encoder
from tests.builders.perception import DEPTH, ROWS, Row, tokens

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
        ({"made_for": "Other with 3 blocks"}, r"made_for: expected none for a vision transformer"),
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
