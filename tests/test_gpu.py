"""What is reckoned of graphics cards: kernels that are counted, and two sets of assumptions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu, gpu_models
from benchmarks.cards import CARDS, Card, Work
from benchmarks.gpu_models import SHAPES, Case
from mame_sd.core.merge import MIN_TOKENS
from tests.builders.tiny import one_level_unet

BOTH = [CARDS["A100"], CARDS["H100"]]
# At the real size of its image, so that products outweigh launches, with few heads and blocks.
SMALL = gpu_models._cut(replace(SHAPES["wan"], heads=8), {"num_layers": 1}, 1)


def test_kernels_of_a_case_are_counted_and_printed() -> None:
    found = gpu.reckon(SMALL, BOTH)
    launches = {row: of["launches"] for row, of in found.items()}
    assert launches["default"][0] > launches["unmerged"][0]
    assert launches["keys, an eighth"] == launches["keys, a quarter"]
    biased, sized = (found[f"default{kernel}"] for kernel in ("", ", kernel without bias"))
    assert 0 < sized["launches"][0] - biased["launches"][0] < 20
    assert sized["seconds"]["A100"][1] < biased["seconds"]["A100"][1]
    plain = found["unmerged"]["seconds"]
    assert plain["A100"] > plain["H100"]
    every = {"small": found}
    assert (
        gpu.table("unmerged", every, BOTH).splitlines()[0]
        == "| unmerged | launches | A100 | H100 |"
    )
    line = gpu.table("keys, a quarter", every, BOTH).splitlines()[2]
    assert line.startswith(f"| small | {launches['keys, a quarter'][0]:,} | ")
    likely, harsh, faster = map(float, line.split(" | ")[2].split("/"))
    assert gpu.table("tomesd, half", every, BOTH).count("small") == 0, "it has no transformers"
    assert likely > harsh > 1, "harsh assumptions leave less to win"
    assert likely > faster > 1, "and so does a faster attention"


def test_a_model_cut_in_depth_stands_for_all_of_its_blocks() -> None:
    whole, cut = (
        gpu_models._cut(replace(SHAPES["wan"], heads=2, size=(2, 4, 6)), {"num_layers": n}, **more)
        for n, more in ((4, {}), (2, {"blocks": 3}))
    )
    work = [gpu.count(case, gpu_models.rows_of(case, 8)["unmerged"]) for case in (whole, cut)]
    assert work[0] == work[1]


@pytest.mark.parametrize("card", BOTH, ids=["A100", "H100"])
def test_the_default_row_follows_the_one_table(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = "cuda, capability 9 and above"
    assert card.min_tokens == MIN_TOKENS[newest if card.name == "H100" else "cuda"]
    monkeypatch.setitem(gpu_models.UNETS, "sd1.5", dict(one_level_unet().config))
    side = math.ceil(card.min_tokens**0.5)
    for least, merges in ((side, True), (side - 1, False)):
        case = Case("sd1.5", 8 * least, dtype=torch.float32)
        default, whole = (
            len(gpu.count(case, gpu_models.rows_of(case, count)["default"]))
            for count in (card.min_tokens, 10**9)
        )
        assert (default > whole) is merges


def test_a_card_is_busy_for_the_longest_of_three_times() -> None:
    card = CARDS["H100"]
    small = Work("add", "other", torch.float16, 8, 0)
    moved = Work("copy", "other", torch.float16, 1e9, 0)
    product = Work("mm", "product", torch.float16, 8, 10**13)
    assert card.busy([small]) == pytest.approx(2.5e-6)
    assert card.busy([moved]) == pytest.approx(1e9 / (0.8 * 3.35e12))
    assert card.harsh.busy([product]) == pytest.approx(10**13 / (0.75 * 989e12))
    assert card.eager([small] * 100, launch=27e-6) == pytest.approx(2.7e-3, rel=0.01)


def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for option, first in (("--card", "GeForce RTX 3060"), ("--model", "SD 1.5 at 512")):
        with pytest.raises(SystemExit):
            gpu.main([option, "SD 9"])
        last = capsys.readouterr().err.splitlines()[-1]
        assert f"{option}: expected a part of one of {first}" in last
