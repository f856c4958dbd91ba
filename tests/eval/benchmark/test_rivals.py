"""Rivals as methods of a run: each leaves no trace, gives the same pixels when resumed, and stands
in the report.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mame_sd.errors import UserError
from mame_sd.eval.benchmark.results import read_results
from mame_sd.eval.benchmark.rows import FLOOR, ROWS, Row
from mame_sd.eval.metric_list import METRICS
from mame_sd.eval.report import render
from mame_sd.eval.results.schema import Value
from mame_sd.eval.rivals.method import Rival
from mame_sd.eval.rivals.tomesd import ToMeSD
from mame_sd.runs.generate import generate
from mame_sd.runs.loading import LoadedModel, load_model
from mame_sd.runs.methods import NotApplicable
from mame_sd.runs.model_files import ModelChoice
from tests.builders.benchmarks import LIKE_SDXL, PROMPTS, SETTINGS, benchmark, rivals, tiny_rows
from tests.builders.kills import snapshot
from tests.builders.tiny import save_tiny_pipeline


def tiny(name: str) -> Row:
    """A rival's row at a setting under which a tiny model merges."""
    row = ROWS[name]
    assert isinstance(row.method, Rival)
    return replace(row, method=replace(row.method, min_tokens=16))


@pytest.mark.parametrize(
    "method",
    [tiny("random-2x2").method, pytest.param(ToMeSD(0.5), marks=rivals)],
    ids=["ours", "tomesd"],
)
def test_a_rival_leaves_no_trace_and_resumes_to_the_same_pixels(
    model: LoadedModel, tmp_path: Path, method: Any
) -> None:
    prompts = PROMPTS[:2]
    generate(model, prompts, SETTINGS, None, tmp_path / "before")
    levels = generate(model, prompts, SETTINGS, method, tmp_path / "rival").levels
    if isinstance(method, ToMeSD):
        level = {"level": 0, "tokens_in": 256, "tokens_kept": 128, "share": 0.5}
        assert (levels[0], levels[1]["share"]) == (level, 1)
    else:
        assert [level["share"] for level in levels] == [0.25] * 2
    generate(model, prompts, SETTINGS, None, tmp_path / "after")
    assert snapshot(tmp_path / "before") == snapshot(tmp_path / "after")
    assert not any(hasattr(module, "_tome_info") for module in model.pipe.unet.modules())
    whole = snapshot(tmp_path / "rival")
    assert whole != snapshot(tmp_path / "before")
    (tmp_path / "rival" / "images" / "p00002_0.png").unlink()
    torch.manual_seed(99)
    assert generate(model, prompts, SETTINGS, method, tmp_path / "rival").made == 1
    assert snapshot(tmp_path / "rival") == whole
    with pytest.raises(UserError, match=r"rival\..*: .* there, .* here"):
        generate(model, prompts, SETTINGS, tiny("todo-2").method, tmp_path / "rival")


@rivals
def test_tomesd_says_where_it_can_do_nothing(tmp_path: Path) -> None:
    folder = save_tiny_pipeline(tmp_path / "like-sdxl", **LIKE_SDXL)
    like_sdxl = load_model(ModelChoice(model=str(folder), device="cpu"))
    with pytest.raises(NotApplicable, match="only at the largest level"):
        generate(like_sdxl, PROMPTS[:1], SETTINGS, ToMeSD(0.5), tmp_path / "run")


def test_a_report_says_whether_the_model_can_tell_methods_apart(
    model: LoadedModel, tmp_path: Path
) -> None:
    too_small = replace(tiny("todo-2"), method=replace(tiny("todo-2").method, min_tokens=1024))
    rows = [*tiny_rows()[::3], tiny("random-2x2"), too_small, tiny(FLOOR)]
    metrics = [METRICS[name] for name in ("psnr", "latency")]
    made = benchmark(
        model, tmp_path / "out", rows=rows, metrics=metrics, rounds=1, prompts=PROMPTS[:2]
    )
    results = made.run()
    assert [row.measured for row in results.rows] == [True, True, True, False, True]
    reason = results.row("todo-2").reason or ""
    assert reason.startswith("todo: expected at least one layer to merge")
    assert "\n" not in reason
    assert (
        results.sensitivity
        == "Sensitivity of this instrument: not measured (needs mean-attention)."
    )
    assert not results.failed
    # as with the metric's weights
    results.row(FLOOR).values["lpips"] = Value(mean=0.002, low=0.001, high=0.003, n=3)
    made.judge()
    render(read_results(tmp_path / "out"), tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8").replace("&#39;", "'")
    assert (
        "FAILS: it can't tell these methods apart. mean-attention: LPIPS 0.0020 (at least 0.10),"
        " MISSED" in page
    )
    assert "one random key of 2 × 2" in page
