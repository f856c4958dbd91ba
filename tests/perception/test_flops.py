"""FLOPs of real architectures: the paper's baselines, and what halving their tokens three times
leaves.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import encoders
from benchmarks.encoders import counted

DOCS = Path(__file__).parents[2] / "docs" / "perception-results.md"


def test_flops_halved_at_3_6_and_9_are_those_counted_by_hand_and_of_the_documentation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of ViT-Ti; larger ones take longer."""
    report = counted("ViT-Ti")
    kept = [197] * 3 + [99] * 3 + [50] * 3 + [26] * 3
    assert [block.tokens_kept for block in report.blocks] == kept
    merging = sum(block.merging for block in report.blocks)
    assert report.flops - merging == pytest.approx(0.62e9, abs=5e6)
    assert merging < 0.01 * report.flops
    small = {"ViT-Ti": encoders.ARCHITECTURES["ViT-Ti"]}
    monkeypatch.setattr(encoders, "ARCHITECTURES", small)
    assert encoders.flops_table() in DOCS.read_text(encoding="utf-8"), (
        "run: python -m benchmarks.encoders --flops"
    )
