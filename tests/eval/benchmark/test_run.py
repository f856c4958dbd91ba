"""A whole benchmark with a tiny model, from prompts to report: resumed, interrupted and shared."""

from __future__ import annotations

import contextlib
import shlex
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from mame_sd.errors import UserError
from mame_sd.eval.benchmark.results import check_out
from mame_sd.eval.cli import app as cli
from mame_sd.eval.metric_list import METRICS
from mame_sd.runs.jobs import GenerateSettings
from mame_sd.runs.loading import LoadedModel
from tests.builders.benchmarks import (
    LIKE_SDXL,
    PROMPTS,
    TINY,
    benchmark,
    every_row,
    results_of,
    rivals,
    rows_of,
    tiny_rows,
)
from tests.builders.run_folders import forget_hashes
from tests.builders.tiny import save_tiny_pipeline


@rivals
def test_every_row_has_every_value_or_a_reason_and_gates_pass(finished: Path) -> None:
    results, rows = results_of(finished), rows_of(finished)
    assert list(rows) == [row.name for row in every_row()]
    lacking = rows.pop("todo-2")
    assert lacking["measured"] is False
    assert lacking["reason"].startswith("todo: expected at least one layer to merge")
    assert results["sensitivity"].endswith(" Not measured: no LPIPS of mean-attention.")
    for name, row in rows.items():
        values = row["values"]
        assert row["measured"]
        assert set(values) == set(TINY.metrics) - (
            {"psnr", "ssim"} if name == "baseline" else set()
        )
        for metric in ("fid", "is"):
            assert values[metric]["withheld"] == "N = 3, needs 100"
        for speed in (values["latency"], values["speedup"]):
            assert 0 < speed["low"] <= speed["mean"] <= speed["high"]
        assert values["memory"]["mean"] > 0
    psnr = rows["mame-tau"]["values"]["psnr"]
    assert psnr["mean"] == pytest.approx(sum(rows["mame-tau"]["per_image"]["psnr"].values()) / 3)
    assert psnr["against"] == "tomesd-50"
    assert 0 < psnr["p"] <= 1
    assert [gate["name"] for gate in results["gates"]] == [
        "baseline against itself",
        "inactive merging against the baseline",
    ]
    manifest = results["manifest"]
    assert manifest["sampling"]["steps"] == 2
    assert manifest["environment"]["torch"] == version("torch")
    assert manifest["prompts"]["count"] == 3
    assert [one["key"] for one in results["pictures"]] == ["p00001_0", "p00002_0", "p00003_0"]


@rivals
def test_running_again_makes_nothing_again_and_mixes_no_figures_of_before(
    model: LoadedModel, finished: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.png")}
    bench_before = (out / "bench.jsonl").read_bytes()

    @contextlib.contextmanager
    def interrupted(name: str) -> Iterator[Callable[[int, int], None]]:
        if name == "ToMeSD 50 %: scores":
            raise KeyboardInterrupt
        yield lambda done, total: None

    with pytest.raises(KeyboardInterrupt):
        benchmark(model, out, rows=every_row(), stage=interrupted).run()
    row = rows_of(out)["mame-default"]
    costs = {"latency", "speedup", "memory"}
    assert set(row["values"]) == costs, "scores are those of another start"
    assert (row["measured"], row["per_image"]) == (True, {})
    benchmark(model, out, rows=every_row()).run()
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.png")} == times
    assert (out / "bench.jsonl").read_bytes() == bench_before
    for name, row in rows_of(finished).items():
        assert rows_of(out)[name]["values"] == row["values"]


def test_other_settings_and_foreign_folders_are_refused(model: LoadedModel, tmp_path: Path) -> None:
    only = [tiny_rows()[0]]
    given: dict[str, Any] = {"rows": only, "metrics": [METRICS["psnr"]], "prompts": PROMPTS[:1]}
    benchmark(model, tmp_path / "out", **given, rounds=1).run()
    before = (tmp_path / "out" / "results.json").read_bytes()
    with pytest.raises(UserError, match="steps: 2 there, 3 here"):
        benchmark(model, tmp_path / "out", **given, settings=GenerateSettings(steps=3)).run()
    assert (tmp_path / "out" / "results.json").read_bytes() == before
    check_out(tmp_path / "out")
    check_out(tmp_path / "new")
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / ".mame-sd.1.tmp").write_text("what a kill in the first write leaves")
    check_out(tmp_path / "killed")
    results = tmp_path / "out" / "results.json"
    results.write_text(results.read_text()[:-100])
    with pytest.raises(UserError, match="delete it and run benchmark again, nothing else is lost"):
        check_out(tmp_path / "out")
    results.unlink()
    check_out(tmp_path / "out")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="dangling: expected a folder, got a link to nothing"):
        check_out(tmp_path / "dangling")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"1 other things in it \('thesis.tex'\)"):
        check_out(tmp_path / "mine")
    (tmp_path / "mine" / "results.json").write_text('{"format": "another"}')
    with pytest.raises(UserError, match="got 'another'; choose another folder"):
        check_out(tmp_path / "mine")


def test_missing_peers_and_weights_leave_a_reason(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mame_sd.eval.rivals.tomesd.has_tomesd", lambda: False)
    monkeypatch.setenv("MAME_SD_WEIGHTS", str(tmp_path / "none"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "none"))
    metrics = [METRICS["lpips"], METRICS["psnr"]]
    rows = [*tiny_rows()[:2], tiny_rows()[3]]
    results = benchmark(
        model, tmp_path / "out", rows=rows, metrics=metrics, prompts=PROMPTS[:1], rounds=1
    ).run()
    assert not results.rows[1].measured
    assert results.rows[1].reason == "tomesd is not installed: pip install 'mame-sd[rivals]'"
    values = results.rows[2].values
    assert values["lpips"].withheld == "not measured: no weights of lpips-alex"
    assert values["psnr"].known
    assert any("mame-sd-eval weights" in note for note in results.notes)


def test_a_command_writes_a_report_and_every_gate_can_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("key\nant\n")
    model_folder = save_tiny_pipeline(
        tmp_path / "like-sdxl", **LIKE_SDXL
    )  # tomesd can do nothing with it
    words = "benchmark --device cpu --offline --steps 1 --height 128 --width 128 --rounds 1"
    given = [*words.split(), "--rows", "tomesd-50,mame-default", "--model", str(model_folder)]
    given += ["--prompts", str(tmp_path / "prompts.txt"), "--weights-dir", str(tmp_path)]
    one = tmp_path / "one"
    assert cli.run([*given, "--out", str(one)]) == 0
    alone = rows_of(one)
    assert [row["measured"] for row in alone.values()] == [True, False, True]
    assert alone["tomesd-50"]["reason"]
    found = set(alone["mame-default"]["per_image"]) - {"lpips"}  # where its weights are here
    assert found == {"psnr", "ssim"}

    results = results_of(one)
    assert "reference" not in results
    command = shlex.join(["mame-sd-eval", *given])
    assert results["manifest"]["command"] == command
    assert command in (one / "report.html").read_text(encoding="utf-8")
    assert "2 prompts (prompts.txt), 1 step, seed 0, model like-sdxl" in results["notes"][0]
    images = sorted((one / "runs" / "baseline" / "images").iterdir())
    forget_hashes(one / "runs" / "baseline")
    # not what the baseline makes
    images[0].write_bytes(images[1].read_bytes())
    capsys.readouterr()
    assert cli.run([*given, "--out", str(one)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "sanity gates failed (baseline against itself, inactive merging" in error
    page = (one / "report.html").read_text(encoding="utf-8")
    assert "2 of 2 sanity gates failed" in page
