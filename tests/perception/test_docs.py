"""Pages about vision transformers: examples run, FLOPs are the paper's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks import encoders
from benchmarks.encoders import counted
from mame_sd import apply_mame, remove_mame
from tests.builders.perception import NAMED
from tests.builders.tiny import seeded

DOCS = Path(__file__).parents[2] / "docs"
USAGE, CLASSIFY = (
    (DOCS / name).read_text(encoding="utf-8")
    for name in ("perception.md", "perception-classify.md")
)
PAGE = USAGE + CLASSIFY
EXAMPLES = re.findall(r"<!-- test: python -->\n```python\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.splitlines()[0][:40])
@torch.no_grad()
def test_examples_run(code: str) -> None:
    row = NAMED["DeiTForImageClassification"]
    tiny = row.build()
    model = seeded(
        type(tiny), 0, type(tiny.config)(**{**tiny.config.to_dict(), "num_hidden_layers": 12})
    )
    scope = {
        "model": model,
        "encoder": model.deit,
        **row.batch(),
        "apply_mame": apply_mame,
        "remove_mame": remove_mame,
    }
    exec(compile(code, "perception.md", "exec"), scope)


def test_flops_halved_at_3_6_and_9_are_those_counted_by_hand_and_of_the_documentation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of ViT-Ti; larger ones take longer."""
    report = counted("ViT-Ti")
    kept = [197] * 3 + [99] * 3 + [50] * 3 + [26] * 3
    assert [block.tokens_kept for block in report.layers] == kept
    merging = sum(block.merging for block in report.layers)
    assert report.flops - merging == pytest.approx(0.62e9, abs=5e6)
    assert merging < 0.01 * report.flops
    small = {"ViT-Ti": encoders.ARCHITECTURES["ViT-Ti"]}
    monkeypatch.setattr(encoders, "ARCHITECTURES", small)
    assert encoders.flops_table() in USAGE, "run: python -m benchmarks.encoders --flops"
