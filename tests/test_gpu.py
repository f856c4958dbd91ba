"""What is estimated of graphics cards: kernels that are counted, and two sets of assumptions."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import attention, gpu
from benchmarks.gpu import CARDS, ROWS, SDXL, Card, unet, wan
from benchmarks.launches import Work
from mame_sd.core.min_tokens import FUSED, MIN_TOKENS
from tests.builders.tiny import one_level_unet

ROOT = Path(__file__).resolve().parents[1]
BOTH = [CARDS["A100"], CARDS["H100"]]


def test_kernels_of_a_case_are_counted_and_printed() -> None:
    # At the real size of its video, so that products outweigh launches, with few heads.
    found = {"small": gpu.estimate(wan((21, 30, 52), heads=8), BOTH)}
    rows = found["small"]
    plain, default, sized = (
        rows[row]["A100"] for row in ("unmerged", "default", "default, kernel without bias")
    )
    assert plain[0] < default[0] < sized[0] < default[0] + 60 * 40
    assert sized[1][1] < default[1][1]
    assert plain[1] > rows["unmerged"]["H100"][1]
    head, _, line = gpu.table("unmerged", found).splitlines()
    assert head == "| unmerged | launches | A100 | H100 |"
    assert line == f"| small | {plain[0]:,} | {1e3 * plain[1][0]:,.1f} ms | " + line.split(" | ")[3]
    line = gpu.table("keys, a quarter", found).splitlines()[2]
    assert line.startswith(f"| small | {rows['keys, a quarter']['A100'][0]:,} | ")
    graph, eager = map(float, line.split(" | ")[2].split("/"))
    assert graph > eager > 1, "launches from Python leave less to gain"


def test_a_model_cut_in_depth_stands_for_all_of_its_blocks() -> None:
    whole = replace(wan((2, 4, 6), heads=2, layers=4), repeats={})
    cut = wan((2, 4, 6), heads=2, layers=2, repeats=3)
    counts = [gpu.count(case, ROWS["unmerged"]) for case in (whole, cut)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("card", BOTH, ids=["A100", "H100"])
def test_the_default_row_follows_the_one_table(card: Card) -> None:
    newest = "cuda, capability 9 and above"
    side = math.ceil(MIN_TOKENS[newest if card.name == "H100" else "cuda", FUSED] ** 0.5)
    for least, merges in ((side, True), (side - 1, False)):
        case = unet(one_level_unet().config, 8 * least, torch.float32)
        default, whole = (
            len(gpu.count(case, ROWS[row], card.capability)) for row in ("default", "unmerged")
        )
        assert (default > whole) is merges


@pytest.mark.parametrize(
    ("case", "cards"),
    [
        (gpu.CASES["SD 3.5 large at 1024"](), {"A100": True, "H100": False}),
        (
            unet(SDXL, 1024, transformer_layers_per_block=1),  # one block of each width
            {"3090": True, "4090": False, "A100": False},
        ),
    ],
    ids=["SD 3.5", "SDXL"],
)
def test_by_default_mlps_are_restored_where_the_page_says(
    case: Any, cards: dict[str, bool]
) -> None:
    for card, restores in cards.items():
        work = gpu.count(case, ROWS["default"], CARDS[card].capability)
        assert any(one.restores for one in work) is restores
        assert any(one.name == "linalg_cholesky_ex" for one in work) is restores


def test_a_card_is_busy_for_the_longest_of_three_times() -> None:
    card = CARDS["H100"]
    small = Work("add", "other", torch.float16, 8, 0)
    moved = Work("copy", "other", torch.float16, 1e9, 0)
    product = Work("mm", "product", torch.float16, 8, 10**13)
    assert card.seconds(small) == pytest.approx(2.5e-6)
    assert card.seconds(moved) == pytest.approx(1e9 / (0.8 * 3.35e12))
    assert card.harsh.seconds(product) == pytest.approx(10**13 / (0.75 * 989e12))
    assert card.eager([small] * 100, launch=27e-6) == pytest.approx(2.7e-3, rel=0.01)
    factors = [
        card.seconds(Work("linalg_cholesky_ex", "other", torch.float32, 8, 0, matrices=n))
        for n in (1, 3, 8, 40)
    ]
    assert factors == [44e-6, 97e-6, 101e-6, 80e-6]
    assert card.seconds(moved._replace(restores=True)) > 2 * card.seconds(moved)


CPU = torch.device("cpu")


def test_attention_is_timed_beside_all_keys_and_what_computes_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds, times = attention.row(64, 1, CPU, torch.float32, 2)
    assert seconds > 0
    assert len(times) == len(attention.KEEPS)
    assert min(times) > 0
    fault = torch.float32  # computes nothing in it
    monkeypatch.setattr(attention, "attention", lambda q, *rest, keep: q * (q.dtype != fault))
    with pytest.raises(SystemExit, match="expected float64's output"):
        attention.row(64, 1, CPU, fault, 1)
