"""What is reckoned of graphics cards: kernels that are counted, and two sets of assumptions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.cards import CARDS, Card
from benchmarks.gpu_models import SD15, SDXL, rows_of, unet, wan
from benchmarks.launches import Work
from mame_sd.core.min_tokens import FUSED, MIN_TOKENS
from tests.builders.tiny import one_level_unet

BOTH = [CARDS["A100"], CARDS["H100"]]


def test_kernels_of_a_case_are_counted_and_printed() -> None:
    # At the real size of its video, so that products outweigh launches, with few heads.
    found = {"small": gpu.reckon(wan((21, 30, 52), heads=8), BOTH)}
    rows = found["small"]
    plain, default, sized = (
        rows[row]["A100"] for row in ("unmerged", "default", "default, kernel without bias")
    )
    assert plain[0] < default[0] < sized[0] < default[0] + 20 * 40
    assert sized[1][1] < default[1][1]
    assert plain[1] > rows["unmerged"]["H100"][1]
    head, _, line = gpu.table("unmerged", found).splitlines()
    assert head == "| unmerged | launches | A100 | H100 |"
    assert line == f"| small | {plain[0]:,} | {1e3 * plain[1][0]:,.1f} ms | " + line.split(" | ")[3]
    line = gpu.table("keys, a quarter", found).splitlines()[2]
    assert line.startswith(f"| small | {rows['keys, a quarter']['A100'][0]:,} | ")
    likely, harsh, faster = map(float, line.split(" | ")[2].split("/"))
    assert likely > harsh > 1, "harsh assumptions leave less to win"
    assert likely > faster > 1, "and so does a faster attention"


def test_a_model_cut_in_depth_stands_for_all_of_its_blocks() -> None:
    whole = replace(wan((2, 4, 6), heads=2, layers=4), repeats={})
    cut = wan((2, 4, 6), heads=2, layers=2, repeats=3)
    counts = [gpu.count(case, rows_of(8)["unmerged"]) for case in (whole, cut)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("card", BOTH, ids=["A100", "H100"])
def test_the_default_row_follows_the_one_table(card: Card) -> None:
    newest = "cuda, capability 9 and above"
    assert card.min_tokens == MIN_TOKENS[newest if card.name == "H100" else "cuda", FUSED]
    side = math.ceil(card.min_tokens**0.5)
    for least, merges in ((side, True), (side - 1, False)):
        case = unet(one_level_unet().config, 8 * least, torch.float32)
        default, whole = (
            len(gpu.count(case, rows_of(count)["default"])) for count in (card.min_tokens, 10**9)
        )
        assert (default > whole) is merges


def test_a_card_is_busy_for_the_longest_of_three_times() -> None:
    card = CARDS["H100"]
    small = Work("add", "other", torch.float16, 8, 0)
    moved = Work("copy", "other", torch.float16, 1e9, 0)
    product = Work("mm", "product", torch.float16, 8, 10**13)
    assert card.seconds(small) == pytest.approx(2.5e-6)
    assert card.seconds(moved) == pytest.approx(1e9 / (0.8 * 3.35e12))
    assert card.harsh.seconds(product) == pytest.approx(10**13 / (0.75 * 989e12))
    assert card.eager([small] * 100, launch=27e-6) == pytest.approx(2.7e-3, rel=0.01)


@pytest.mark.parametrize(("config", "millions"), [(SD15, 859.5), (SDXL, 2567.5)])
def test_the_unets_are_the_published_ones(config: dict[str, Any], millions: float) -> None:
    model = unet(config, 64, torch.float32).build(torch.device("meta"))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(millions * 1e6, rel=1e-4)
