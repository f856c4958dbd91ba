"""The table of speed of real architectures: equal tokens, rounds that are kept, figures from
seconds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import encoders
from benchmarks.encoders import METHODS, TOWERS, UNEQUAL, Cell, speed, speed_head, speed_row, vit
from mame_sd.eval.perception.methods import Rival
from mame_sd.eval.perception.rules import RandomDrop
from mame_sd.perception.known_encoders import find_encoder

SMALL = Cell("ViT-Ti", 64, "float32", 2)  # 16 patches
CPU = torch.device("cpu")


@torch.no_grad()
def test_every_method_leaves_the_tokens_of_merging_and_tome_is_no_mere_dropping() -> None:
    torch.manual_seed(0)
    model, pixels = vit("ViT-Ti", 64), torch.randn(2, 3, 64, 64)
    seen = {}
    for name, method in METHODS.items():
        with method.counted(model) as handle:
            seen[name] = model(pixels).logits
            kept = [block.tokens_kept for block in handle.report().blocks]
        if name == "unmerged":
            assert kept == [17] * 12
        if name not in UNEQUAL:
            assert kept == [17] * 3 + [9] * 3 + [5] * 3 + [3] * 3, name
    for name, logits in seen.items():
        assert not any(
            torch.equal(logits, other) for rest, other in seen.items() if rest != name
        ), name


@torch.no_grad()
@pytest.mark.parametrize(("name", "side", "tokens"), [("CLIP-L", 28, 5), ("SigLIP-B", 32, 4)])
def test_the_towers_of_zero_shot_models_are_timed_too(
    name: str, side: int, tokens: int, monkeypatch: Any
) -> None:
    one, *kinds = TOWERS[name]
    monkeypatch.setitem(TOWERS, name, (replace(one, width=32, heads=2), *kinds))
    model = vit(name, side)
    assert len(find_encoder(model)[1]) == one.depth
    with METHODS["unmerged"].counted(model) as handle:
        assert model(torch.zeros(1, 3, side, side)).pooler_output.shape == (1, 32)
        assert handle.report().blocks[0].tokens_in == tokens


def test_rounds_are_kept_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = speed(SMALL, 1, tmp_path, CPU)
    assert set(first) == set(METHODS)
    both = speed(SMALL, 2, tmp_path, CPU)
    assert {name: seconds[:1] for name, seconds in both.items()} == first
    monkeypatch.setattr(encoders, "vit", lambda *args: pytest.fail("nothing is left to measure"))
    assert speed(SMALL, 2, tmp_path, CPU) == both
    assert len(speed_row(SMALL, both).split(" | ")) == len(
        speed_head().splitlines()[0].split(" | ")
    )


def test_other_numbers_of_tokens_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(encoders.METHODS, "fewer tokens", Rival(RandomDrop(0.25)))
    with pytest.raises(SystemExit, match="expected as many tokens from every method"):
        speed(SMALL, 1, tmp_path, CPU)
    assert not list(tmp_path.iterdir())


def test_the_row_gives_medians_ratios_and_what_is_captured() -> None:
    given = (
        [1.0] * 3,
        [0.5, 0.4, 0.8],
        [1.0, 0.5, 0.8],
        [0.5] * 3,
        [0.25] * 3,
        [0.4] * 3,
    )
    seconds = dict(zip(METHODS, given, strict=True))
    cells = [
        cell.strip(" |")
        for cell in speed_row(Cell("ViT-B", 512, "bfloat16", 8), seconds).split(" | ")
    ]
    assert cells[:5] == ["ViT-B at 512", "bfloat16", "8", "1 (1 to 1)", "2 (1.62 to 2.25)"]
    assert cells[9:] == [
        "2.00 (1.62 to 2.25)",
        "1.25 (1.12 to 1.62)",
        "1.00 (0.81 to 1.12)",
        "2.50",
        "0.67",
    ]
