"""FLOPs of real architectures: the paper's baselines, and what halving their tokens three times
leaves.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.encoders import ARCHITECTURES, counted, flops_table

DOCS = Path(__file__).parents[2] / "docs" / "perception-results.md"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_unmerged_flops_are_the_paper_s(name: str) -> None:
    before = counted(name).flops_before / 1e9
    norms = (
        5
        * 2
        * ARCHITECTURES[name].depth
        * ARCHITECTURES[name].width
        * (257 if name == "ViT-H" else 197)
        / 1e9
    )
    assert (
        round(before + norms, 1) == ARCHITECTURES[name].printed
    )  # it counts 5 an element of layer norms
    assert before == pytest.approx(ARCHITECTURES[name].printed, abs=0.11)


@pytest.mark.parametrize(("name", "gflops"), [("ViT-Ti", 0.62), ("ViT-B", 8.72)])
def test_flops_halved_at_3_6_and_9_are_those_counted_by_hand(name: str, gflops: float) -> None:
    report = counted(name)
    assert [block.tokens_kept for block in report.blocks] == [197] * 3 + [99] * 3 + [50] * 3 + [
        26
    ] * 3
    merging = sum(block.merging for block in report.blocks)
    assert report.flops - merging == pytest.approx(gflops * 1e9, abs=5e6)
    assert merging < 0.01 * report.flops


def test_the_table_in_the_documentation_is_current() -> None:
    assert flops_table() in DOCS.read_text(encoding="utf-8"), (
        "run: python -m benchmarks.encoders --flops"
    )
