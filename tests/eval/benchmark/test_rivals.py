"""Rivals as methods of a run: each leaves no trace, gives the same pixels when resumed, and stands
in the report.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from mame_sd.eval.benchmark.results import read_results
from mame_sd.eval.benchmark.rows import FLOOR, Row, rival_rows
from mame_sd.eval.metric_list import METRICS
from mame_sd.eval.report import render
from mame_sd.eval.results.schema import Value
from mame_sd.eval.rivals.method import Rival
from mame_sd.runs.generate import generate
from mame_sd.runs.loading import LoadedModel
from tests.builders.benchmarks import PROMPTS, SETTINGS, benchmark, tiny_rows
from tests.builders.kills import snapshot


def tiny(name: str) -> Row:
    """A rival's row at a setting under which a tiny model merges."""
    row = next(row for row in rival_rows() if row.name == name)
    assert isinstance(row.method, Rival)
    return replace(row, method=replace(row.method, min_tokens=16))


def test_a_rival_leaves_no_trace_and_resumes_to_the_same_pixels(
    model: LoadedModel, tmp_path: Path
) -> None:
    method, prompts = tiny("random-2x2").method, PROMPTS[:2]
    generate(model, prompts, SETTINGS, None, tmp_path / "before")
    summary = generate(model, prompts, SETTINGS, method, tmp_path / "rival")
    assert [level["share"] for level in summary.levels] == [0.25] * 2
    generate(model, prompts, SETTINGS, None, tmp_path / "after")
    assert snapshot(tmp_path / "before") == snapshot(tmp_path / "after")
    whole = snapshot(tmp_path / "rival")
    assert whole != snapshot(tmp_path / "before")
    (tmp_path / "rival" / "images" / "p00002_0.png").unlink()
    torch.manual_seed(99)
    assert generate(model, prompts, SETTINGS, method, tmp_path / "rival").made == 1
    assert snapshot(tmp_path / "rival") == whole


def test_one_step_images_do_not_take_what_was_kept_for_the_one_before(
    model: LoadedModel, tmp_path: Path
) -> None:
    one = replace(SETTINGS, steps=1)
    generate(model, PROMPTS[1:], one, tiny("toma-50").method, tmp_path / "all")
    generate(model, PROMPTS[2:], one, tiny("toma-50").method, tmp_path / "last")
    assert (tmp_path / "all/images/p00003_0.png").read_bytes() == (
        tmp_path / "last/images/p00003_0.png"
    ).read_bytes()


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
    for name in ("report.html", "report.md"):
        text = (tmp_path / "out" / name).read_text(encoding="utf-8")
        assert (
            "FAILS: it can't tell these methods apart. mean-attention: LPIPS 0.0020 (at least"
            " 0.10), MISSED" in text.replace("&#39;", "'")
        )
        assert "one random key of 2 × 2" in text
