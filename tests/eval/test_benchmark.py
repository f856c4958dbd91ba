"""The benchmark: every row from prompts to report with a tiny model, resumed, interrupted and shared; its methods and gates."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mame_sd.eval.benchmark.bench import alike_batches, bench, peak_call, timed_call
from mame_sd.eval.benchmark.gates import ceiling_gate, repeat_gates, unrelated_pairs
from mame_sd.eval.benchmark.methods import Method, NotApplicable, ToMeSD, paper_methods
from mame_sd.eval.benchmark.results import check_out, read_results
from mame_sd.eval.benchmark.run import Benchmark
from mame_sd.eval.benchmark.suites import SUITES, Suite, suite_named
from mame_sd.eval.benchmark.timings import FORMAT, read_record, summary
from mame_sd.eval.benchmark.trace import kept_per_step
from mame_sd.eval.cli import app as cli
from mame_sd.eval.cli.benchmark import chosen_methods, command_again, suite_metrics, suite_prompts
from mame_sd.eval.metric_list import METRICS
from mame_sd.eval.metrics.lpips import Lpips
from mame_sd.eval.report import render
from mame_sd.eval.scoring.retrieval import subjects_by_caption
from mame_sd.eval.scoring.runs import Run
from mame_sd.eval.scoring.score import pair_values
from mame_sd.eval.scoring.tools import Tools

from mame_sd.config import MaMeConfig
from mame_sd.errors import UserError
from mame_sd.runs.generate import generate
from mame_sd.runs.jobs import GenerateSettings, jobs_of
from mame_sd.runs.loading import LoadedModel, load_model
from mame_sd.runs.methods import Merging
from mame_sd.runs.model_files import ModelChoice
from mame_sd.runs.prompt_files import Prompt, prompts_from_texts
from tests.builders import seeded
from tests.builders.kills import snapshot
from tests.builders.run_folders import write_run
from tests.builders.tiny import save_tiny_pipeline

ROOT = Path(__file__).parents[2]
PROMPTS = prompts_from_texts(["key on a black background", "ant on a pink background", "star on a purple background"])
SETTINGS = GenerateSettings(steps=2)
KEEP = MaMeConfig(keep=0.5, min_tokens=16)
TAU = MaMeConfig(preset="plain", tau=0.3, min_tokens=16)
LIKE_SDXL = {  # no attention at the largest level
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}
peers = pytest.mark.skipif(importlib.util.find_spec("tomesd") is None, reason="tomesd is not installed (extra peers)")


def tiny_methods() -> list[Method]:
    """The paper's rows at settings under which a tiny model merges."""
    return [
        Method(name="baseline", label="baseline", family="baseline"),
        Method(name="tomesd-50", label="ToMeSD 50 %", family="tomesd", patch=ToMeSD(0.5)),
        Method(name="mame-tau", label="MaMe+MaRe", family="mame", patch=Merging(TAU)),
        Method(name="mame-default", label="MaMe default", family="mame", patch=Merging(KEEP), default=True),
    ]


TINY = Suite(
    name="tiny", about="for tests", prompts=None, num=3, steps=2, rounds=2, glyphs=True,
    metrics=("psnr", "ssim", "fid", "is_effnet", "background", "latency", "denoising", "memory", "memory_denoising"),
)  # fmt: skip


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_pipeline(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(model_folder: Path) -> LoadedModel:
    return load_model(ModelChoice(model=str(model_folder), device="cpu"))


def stage(name: str) -> contextlib.AbstractContextManager[Callable[[int, int], None]]:
    return contextlib.nullcontext(lambda done, total: None)


def benchmark(model: LoadedModel, out: Path, **changes: Any) -> Benchmark:
    values: dict[str, Any] = {
        "suite": TINY, "model": model, "prompts": PROMPTS, "settings": SETTINGS, "methods": tiny_methods(),
        "metrics": suite_metrics(TINY, glyphs=True), "reference": None, "out": out, "tools": Tools(offline=True),
        "stage": stage, "rounds": 2,
    }  # fmt: skip
    return Benchmark(**{**values, **changes})


@pytest.fixture(scope="module")
def finished(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished benchmark."""
    out = tmp_path_factory.mktemp("benchmark") / "out"
    benchmark(model, out).run()
    return out


def rows_of(out: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in read_results(out)["rows"]}


@peers
def test_every_row_has_every_value_or_a_reason(finished: Path) -> None:
    rows = rows_of(finished)
    assert list(rows) == ["baseline", "tomesd-50", "mame-tau", "mame-default"]
    for name, row in rows.items():
        assert row["status"] == "measured"
        expected = set(TINY.metrics) - ({"psnr", "ssim"} if name == "baseline" else set())
        assert set(row["values"]) == expected
        for metric in ("fid", "is_effnet"):
            assert row["values"][metric]["withheld"] == "N = 3, needs 100"
        for metric in ("latency", "denoising", "memory", "memory_denoising", "background"):
            assert row["values"][metric]["mean"] >= 0
        latency = row["values"]["latency"]
        assert latency["low"] <= latency["mean"] <= latency["high"]
        assert row["values"]["denoising"]["mean"] < latency["mean"]
        assert row["values"]["memory_denoising"]["mean"] <= row["values"]["memory"]["mean"]
    psnr = rows["mame-tau"]["values"]["psnr"]
    assert psnr["mean"] == pytest.approx(sum(rows["mame-tau"]["per_image"]["psnr"].values()) / 3)
    assert psnr["low"] < psnr["high"] < math.inf
    assert psnr["against"] == "tomesd-50"
    assert 0 < psnr["p"] <= 1
    assert rows["mame-tau"]["values"]["background"]["against"] == "baseline"


@peers
def test_gates_pass_and_the_manifest_says_what_was_done(finished: Path) -> None:
    results = read_results(finished)
    assert [gate["name"] for gate in results["gates"]] == [
        "baseline against itself",
        "inactive patch against the baseline",
        "unrelated pairing, the ceiling",
    ]
    assert [gate["got"] for gate in results["gates"][:2]] == ["inf dB, lowest of 2"] * 2
    manifest = results["manifest"]
    assert manifest["sampling"]["steps"] == 2
    assert manifest["environment"]["torch"] == torch.__version__
    assert manifest["attention"]["processors"] == "AttnProcessor2_0"
    assert manifest["prompts"]["count"] == 3
    assert set(results["images"]) == {"p00001_0", "p00002_0", "p00003_0"}


@peers
def test_kept_tokens_are_counted_step_by_step(finished: Path) -> None:
    rows = rows_of(finished)
    assert rows["baseline"]["kept"] == []
    kept = {(entry["step"], entry["level"]): entry for entry in rows["mame-default"]["kept"]}
    assert set(kept) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert (kept[1, 0]["tokens"], kept[1, 0]["kept"]) == (256, 128)
    assert [entry["kept"] for entry in rows["tomesd-50"]["kept"] if entry["level"] == 0] == [128, 128]


@peers
def test_a_report_is_made_of_it(finished: Path) -> None:
    render(read_results(finished), finished)
    html = (finished / "report.html").read_text(encoding="utf-8")
    assert "ToMeSD 50 %" in html
    assert "N = 3, needs 100" in html


@peers
def test_running_again_computes_nothing_again(model: LoadedModel, finished: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.png")}
    bench_before, scores = (out / "bench.jsonl").read_bytes(), (out / "scores" / "mame-tau.json").read_bytes()
    benchmark(model, out).run()
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.png")} == times
    assert (out / "bench.jsonl").read_bytes() == bench_before
    assert (out / "scores" / "mame-tau.json").read_bytes() == scores
    for name, row in rows_of(finished).items():
        assert rows_of(out)[name]["values"] == row["values"]


@peers
def test_a_resumed_benchmark_mixes_no_figures_of_before(model: LoadedModel, finished: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "out"))

    @contextlib.contextmanager
    def interrupted(name: str) -> Iterator[Callable[[int, int], None]]:
        if name == "ToMeSD 50 %: scores":
            raise KeyboardInterrupt
        yield lambda done, total: None

    with pytest.raises(KeyboardInterrupt):
        benchmark(model, out, stage=interrupted).run()
    row = rows_of(out)["mame-default"]
    assert set(row["values"]) == {"latency", "denoising", "memory", "memory_denoising"}, (
        "scores are those of another start"
    )
    assert (row["status"], row["per_image"], len(row["kept"])) == ("measured", {}, 4)


@peers
def test_a_changed_image_is_scored_again(model: LoadedModel, finished: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    images = out / "runs" / "mame-tau" / "images"
    shutil.copy(out / "runs" / "baseline" / "images" / "p00001_0.png", images / "p00001_0.png")
    benchmark(model, out).run()
    assert rows_of(out)["mame-tau"]["per_image"]["psnr"]["p00001_0"] == math.inf
    untouched = rows_of(finished)["mame-tau"]["per_image"]["psnr"]["p00002_0"]
    assert rows_of(out)["mame-tau"]["per_image"]["psnr"]["p00002_0"] == untouched
    assert rows_of(out)["mame-tau"]["values"]["psnr"]["equal"] == 1
    assert all(gate["passed"] for gate in read_results(out)["gates"])


def test_what_was_done_is_kept_when_it_is_interrupted(model: LoadedModel, tmp_path: Path) -> None:
    methods = [method for method in tiny_methods() if method.family != "tomesd"]
    seen: list[str] = []

    @contextlib.contextmanager
    def interrupted(name: str) -> Iterator[Callable[[int, int], None]]:
        seen.append(name)
        if name == "MaMe default: images":
            raise KeyboardInterrupt
        yield lambda done, total: None

    with pytest.raises(KeyboardInterrupt):
        benchmark(model, tmp_path, methods=methods, stage=interrupted).run()
    rows = rows_of(tmp_path)
    assert [row["status"] for row in rows.values()] == ["measured", "measured", "not measured"]
    assert "not yet" in rows["mame-default"]["reason"]
    images = snapshot(tmp_path / "runs" / "baseline")
    benchmark(model, tmp_path, methods=methods).run()
    assert [row["status"] for row in rows_of(tmp_path).values()] == ["measured"] * 3
    assert snapshot(tmp_path / "runs" / "baseline") == images


def test_other_settings_and_foreign_folders_are_refused(model: LoadedModel, tmp_path: Path) -> None:
    only = [tiny_methods()[0]]
    benchmark(model, tmp_path / "out", methods=only, metrics=[METRICS["psnr"]]).run()
    before = (tmp_path / "out" / "results.json").read_bytes()
    with pytest.raises(UserError, match="steps: 2 there, 3 here"):
        benchmark(model, tmp_path / "out", methods=only, settings=GenerateSettings(steps=3)).run()
    assert (tmp_path / "out" / "results.json").read_bytes() == before
    check_out(tmp_path / "out")
    check_out(tmp_path / "new")
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / ".mame-sd.1.tmp").write_text("what a kill in the first write leaves")
    check_out(tmp_path / "killed")
    results = tmp_path / "out" / "results.json"
    whole = results.read_text()
    results.write_text(json.dumps({"format": json.loads(whole)["format"], "rows": [{"name": "baseline"}]}))
    with pytest.raises(UserError, match=r"got some without 'manifest'; delete results\.json and run again"):
        benchmark(model, tmp_path / "out", methods=only).run()
    results.write_text(whole[:-100])
    with pytest.raises(UserError, match="delete it and run benchmark again, nothing else is lost"):
        check_out(tmp_path / "out")
    results.unlink()
    check_out(tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"1 other things in it \('thesis.tex'\)"):
        check_out(tmp_path / "mine")
    (tmp_path / "mine" / "results.json").write_text("{}")
    with pytest.raises(UserError, match="got another file"):
        check_out(tmp_path / "mine")


def test_missing_peers_and_weights_leave_a_reason(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mame_sd.eval.benchmark.methods.has_tomesd", lambda: False)
    monkeypatch.setenv("MAME_SD_WEIGHTS", str(tmp_path / "none"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "none"))
    metrics = [METRICS["lpips"], METRICS["psnr"]]
    results = benchmark(model, tmp_path / "out", methods=tiny_methods()[:2], metrics=metrics).run()
    assert results["rows"][1]["status"] == "not measured"
    assert results["rows"][1]["reason"] == "tomesd is not installed: pip install mame-sd[peers]"
    results = benchmark(model, tmp_path / "other", methods=tiny_methods()[::3], metrics=metrics).run()
    assert results["rows"][1]["values"]["lpips"]["withheld"] == "not measured: no weights of lpips-alex"
    assert results["rows"][1]["values"]["psnr"]["mean"] > 0
    assert any("mame-sd-eval weights" in note for note in results["notes"])


@peers
def test_tomesd_merges_leaves_no_trace_and_resumes_to_the_same_pixels(model: LoadedModel, tmp_path: Path) -> None:
    generate(model, PROMPTS, SETTINGS, None, tmp_path / "before")
    summary_of_run = generate(model, PROMPTS, SETTINGS, ToMeSD(0.5), tmp_path / "tomesd")
    assert summary_of_run.levels[0] == {"level": 0, "tokens_in": 256, "tokens_kept": 128, "share": 0.5}
    assert summary_of_run.levels[1]["share"] == 1
    generate(model, PROMPTS, SETTINGS, None, tmp_path / "after")
    assert snapshot(tmp_path / "before") == snapshot(tmp_path / "after")
    assert not any(hasattr(module, "_tome_info") for module in model.pipe.unet.modules())
    whole = snapshot(tmp_path / "tomesd")
    assert whole != snapshot(tmp_path / "before")
    (tmp_path / "tomesd" / "images" / "p00003_0.png").unlink()
    torch.manual_seed(99)
    assert generate(model, PROMPTS, SETTINGS, ToMeSD(0.5), tmp_path / "tomesd").made == 1
    assert snapshot(tmp_path / "tomesd") == whole
    with pytest.raises(UserError, match=r"peer.ratio: 0.5 there, 0.25 here"):
        generate(model, PROMPTS, SETTINGS, ToMeSD(0.25), tmp_path / "tomesd")


@peers
def test_tomesd_says_where_it_can_do_nothing(tmp_path: Path) -> None:
    folder = save_tiny_pipeline(tmp_path / "like-sdxl", **LIKE_SDXL)
    like_sdxl = load_model(ModelChoice(model=str(folder), device="cpu"))
    with pytest.raises(NotApplicable, match="only at the largest level"):
        generate(like_sdxl, PROMPTS, SETTINGS, ToMeSD(0.5), tmp_path / "run")
    config = MaMeConfig(keep=0.5, min_tokens=16)
    methods = [*tiny_methods()[:2], Method(name="mame", label="MaMe", family="mame", patch=Merging(config))]
    results = benchmark(like_sdxl, tmp_path / "out", methods=methods, metrics=[METRICS["psnr"]], rounds=1).run()
    assert [row["status"] for row in results["rows"]] == ["measured", "not measured", "measured"]
    assert "largest level" in results["rows"][1]["reason"]


@pytest.mark.parametrize("ratio", [0, -1, 0.76, math.nan])
def test_ratios_out_of_range_are_refused(ratio: float) -> None:
    with pytest.raises(UserError, match=r"--ratio: expected a share above 0 and at most 0.75"):
        ToMeSD(ratio)


def test_timings_continue_and_start_over_when_anything_else_is_timed(model: LoadedModel, tmp_path: Path) -> None:
    methods = [method for method in tiny_methods() if method.family != "tomesd"]
    batches = alike_batches(jobs_of(PROMPTS, SETTINGS), 1)
    record = tmp_path / "bench.jsonl"
    counts: list[int] = []
    found = bench(model, SETTINGS, batches, methods, 2, record, lambda done, total: counts.append(done))
    assert counts == list(range(7))
    assert {name: len(timings) for name, timings in found.items()} == {method.name: 2 for method in methods}
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(line["round"], line["method"]) for line in lines[1:]] == [
        (0, "baseline"), (0, "mame-tau"), (0, "mame-default"), (1, "mame-tau"), (1, "mame-default"), (1, "baseline"),
    ]  # fmt: skip
    counts.clear()
    again = bench(model, SETTINGS, batches, methods, 3, record, lambda done, total: counts.append(done))
    assert counts == [6, 7, 8, 9]
    assert {name: timings[:2] for name, timings in again.items()} == found
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:9]))  # stopped within the third round
    counts.clear()
    bench(model, SETTINGS, batches, methods, 3, record, lambda done, total: counts.append(done))
    assert counts == [6, 7, 8, 9], "a round of which a part is missing is timed as a whole"
    counts.clear()
    bench(model, GenerateSettings(steps=1), batches, methods, 1, record, lambda done, total: counts.append(done))
    assert counts == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{broken",
        "[1, 2]",
        '{"a": 1}',
        '{"format": "mame-sd timings 0"}',
        f'{{"format": "{FORMAT}"}}\n{{"foreign": 1}}',
        f'{{"format": "{FORMAT}"}}\n{{"round": 0, "method": "baseline", "seconds": "two"}}',
    ],
)
def test_a_file_that_is_no_record_of_timings_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    (tmp_path / "bench.jsonl").write_text(text)
    (tmp_path / "runs").mkdir()
    for check in (lambda: read_record(tmp_path / "bench.jsonl"), lambda: check_out(tmp_path)):
        with pytest.raises(UserError, match=r"bench.jsonl: expected timings \('mame-sd timings 1'\), got another file"):
            check()
    assert (tmp_path / "bench.jsonl").read_text() == text
    assert read_record(tmp_path / "none.jsonl") == {}


def test_each_round_times_another_prompt_and_every_method_on_it(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mame_sd.eval.benchmark.bench as module

    seen: list[tuple[str, str]] = []

    def watched(model: LoadedModel, settings: Any, jobs: Any, method: Method) -> Any:
        seen.append((jobs[0].name, method.name))
        return timed_call(model, settings, jobs, method)

    monkeypatch.setattr(module, "timed_call", watched)
    one_step, methods = GenerateSettings(steps=1), tiny_methods()[::3]
    bench(model, one_step, alike_batches(jobs_of(PROMPTS, one_step), 1), methods, 4, tmp_path / "bench.jsonl")
    names = ["p00001_0", "p00002_0", "p00003_0", "p00001_0"]
    assert [name for name, _ in seen[::2]] == [name for name, _ in seen[1::2]] == names
    assert {method for _, method in seen[2:4]} == {"baseline", "mame-default"}


def test_batches_that_are_timed_are_of_one_size_and_length() -> None:
    sizes = [64, 64, 64, 128, 64, 64]
    prompts = [
        replace(prompt, id=str(n), width=size) for n, (prompt, size) in enumerate(zip(PROMPTS * 2, sizes, strict=True))
    ]
    batches = alike_batches(jobs_of(prompts, SETTINGS), 2)
    assert [[job.prompt.id for job in batch] for batch in batches] == [["0", "1"], ["4", "5"]]


@peers
def test_bench_refuses_rows_that_do_nothing(tmp_path: Path) -> None:
    folder = save_tiny_pipeline(tmp_path / "like-sdxl", **LIKE_SDXL)
    like_sdxl = load_model(ModelChoice(model=str(folder), device="cpu"))
    batches = alike_batches(jobs_of(PROMPTS, SETTINGS), 1)
    with pytest.raises(NotApplicable, match="only at the largest level"):
        bench(like_sdxl, SETTINGS, batches, tiny_methods()[:2], 1, tmp_path / "bench.jsonl", must_merge=True)


def test_bench_times_alone(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["bench", "--model", str(model_folder), "--device", "cpu", "--steps", "1", "--rounds", "1"]
    options += ["--rows", "baseline", "--height", "64", "--width", "64", "--format", "json"]
    assert cli.run([*options, "--batch-size", "13"]) == 2
    assert "--batch-size: expected at most 12, as many prompts as there are" in capsys.readouterr().err
    assert cli.run([*options, "--prompt", "key", "--prompt", "ant"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"]["baseline"]["latency"]["n"] == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.run(options) == 2
    assert capsys.readouterr().err.startswith(
        "error: bench: expected one process, for several slow each other down, got 2"
    )


@pytest.mark.parametrize("other", ["prompt", "config", "rows"])
def test_timings_of_other_work_are_not_taken_for_these(model: LoadedModel, tmp_path: Path, other: str) -> None:
    baseline, _, _, default = tiny_methods()
    one_step, record = GenerateSettings(steps=1), tmp_path / "bench.jsonl"
    batches = [jobs_of(prompts_from_texts(["key"]), one_step)]
    methods = [baseline] if other == "rows" else [baseline, default]
    bench(model, one_step, batches, methods, 1, record)
    changed = replace(default, patch=Merging(MaMeConfig(keep=0.25, min_tokens=16)))
    methods = [baseline, changed if other == "config" else default]
    if other == "prompt":
        batches = [jobs_of(prompts_from_texts(["ant"]), one_step)]
    counts: list[int] = []
    bench(model, one_step, batches, methods, 1, record, lambda done, total: counts.append(done))
    assert counts == [0, 1, 2]


def test_timed_calls_measure_denoising_apart(model: LoadedModel) -> None:
    jobs = jobs_of(PROMPTS[:2], SETTINGS)
    timing = timed_call(model, GenerateSettings(steps=4, batch_size=2), jobs, tiny_methods()[0])
    assert timing.denoising is not None
    assert 0 < timing.denoising < timing.seconds
    costs = summary([timing, timing, timing])
    assert costs["latency"] == {
        "mean": timing.seconds, "low": timing.seconds, "high": timing.seconds, "n": 3, "statistic": "median, quartiles",
    }  # fmt: skip


def test_peak_memory_counts_weights_and_grows_with_the_batch(model: LoadedModel) -> None:
    one, two = (
        peak_call(model, GenerateSettings(steps=1, batch_size=n), jobs_of(PROMPTS[:n], SETTINGS), tiny_methods()[0])
        for n in (1, 3)
    )
    weights = sum(
        p.numel() * 4 for part in (model.pipe.unet, model.pipe.vae, model.pipe.text_encoder) for p in part.parameters()
    )
    for peak in (one, two):
        assert peak.allocated is not None
        assert peak.allocated_denoising is not None
        assert weights < peak.allocated_denoising <= peak.allocated
    assert two.allocated_denoising > one.allocated_denoising  # type: ignore[operator]


def test_a_gate_fails_when_the_baseline_is_not_repeated(model: LoadedModel, tmp_path: Path) -> None:
    generate(model, PROMPTS, SETTINGS, KEEP, tmp_path / "merged")
    jobs = jobs_of(PROMPTS, SETTINGS)[:1]
    gates = repeat_gates(model, SETTINGS, [jobs], Run.open(tmp_path / "merged"), KEEP)
    assert [gate["passed"] for gate in gates] == [False, False]
    assert all(module.__class__.__name__ != "ToMeBlock" for module in model.pipe.unet.modules())


def test_the_ceiling_gate_fails_when_any_method_is_as_far_as_another_prompt(tmp_path: Path) -> None:
    shapes = json.loads((ROOT / "tests" / "oracles" / "eval.json").read_text())["lpips"]["alex"]["shapes"]
    network = Lpips("alex", seeded.weights({name: tuple(shape) for name, shape in shapes.items()}))
    pictures = {f"{n}_0": seeded.picture(f"ceiling {n}", 64, 64) for n in range(3)}
    baseline = Run.open(write_run(tmp_path / "run", pictures))
    tools = Tools(networks={"lpips-alex": network})
    metrics = [METRICS["psnr"], METRICS["lpips"]]
    unrelated = pair_values(metrics, unrelated_pairs(baseline), tools)
    ceiling = {name: sum(values.values()) / 3 for name, values in unrelated.items()}

    def passes(**factors: float) -> bool:
        """With one method that equals the baseline, and one at so many times the ceiling."""
        equal = {"psnr": {"mean": math.inf}, "lpips": {"mean": 0.0}}
        other = {name: {"mean": ceiling[name] * factor} for name, factor in factors.items()}
        gate = ceiling_gate(baseline, [METRICS[name] for name in factors], [equal, other], tools)
        assert gate is not None
        return bool(gate["passed"])

    assert passes(psnr=1.1, lpips=0.9)
    assert not passes(psnr=0.9, lpips=0.9)
    assert not passes(psnr=1.1, lpips=1.1)
    for name in ceiling:
        assert not passes(**{name: 1.0})


def test_every_gate_can_fail_and_then_the_exit_status_is_1(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["benchmark", "--offline", "--num", "2", "--steps", "1", "--rows", "mame-default", "--rounds", "1"]
    options += ["--height", "64", "--width", "64", "--model", str(model_folder), "--device", "cpu"]
    assert cli.run([*options, "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    images = sorted((tmp_path / "out" / "runs" / "baseline" / "images").iterdir())
    images[0].write_bytes(images[1].read_bytes())  # not what the baseline makes, and no other prompt's image differs
    assert cli.run([*options, "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "expected every sanity gate to pass, failed: baseline against itself, inactive patch" in error
    assert "unrelated pairing" in error
    assert "3 of 3 sanity gates failed" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_steps_are_not_traced_for_the_baseline(model: LoadedModel) -> None:
    assert kept_per_step(model, SETTINGS, jobs_of(PROMPTS, SETTINGS)[0], tiny_methods()[0]) == []


def test_the_papers_rows_are_there_and_rows_can_be_chosen() -> None:
    labels = [method.label for method in paper_methods()]
    assert labels == ["baseline", "ToMeSD 25 %", "ToMeSD 50 %", "MaMe+MaRe τ 0.7", "MaMe+MaRe τ 0.8", "MaMe default"]
    config = paper_methods()[3].config["mame"]
    assert (config["tau"], config["preset"], config["merge"]) == (0.7, "plain", "qkv")
    assert [method.name for method in chosen_methods("mame-default")] == ["baseline", "mame-default"]
    with pytest.raises(UserError, match="--rows: expected names of baseline, tomesd-25"):
        chosen_methods("mame-default,tomesd-99")


def test_suites_hold_what_the_paper_and_the_issue_say() -> None:
    paper = SUITES["paper"]
    assert (paper.steps, paper.guidance, paper.seed, paper.height, paper.width) == (50, 7.5, 42, 768, 768)
    assert (paper.dtype, paper.scheduler, paper.num) == ("float32", "dpm++", 2000)
    for suite in SUITES.values():
        assert set(suite.metrics) <= set(METRICS)
        GenerateSettings(**suite.sampling({"steps": 3, "guidance": None}))
    assert paper.sampling({"steps": 3, "guidance": None})["guidance"] == 7.5
    with pytest.raises(UserError, match="--suite: expected one of quick, embedded, paper"):
        suite_named("huge")


def test_the_report_names_its_command_and_another_model_has_no_ground_truth(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "two words"
    options = ["benchmark", "--offline", "--num", "2", "--steps", "1", "--rows", "mame-default", "--rounds", "1"]
    given = [*options, "--height", "64", "--width", "64", "--model", str(model_folder), "--device", "cpu"]
    assert cli.run([*given, "--out", str(out)]) == 0, capsys.readouterr().err
    results = read_results(out)
    assert all(prompt["prompt"] in subjects_by_caption() for prompt in results["images"].values())
    assert not {"retrieval", "background"} & set(results["metrics"])
    assert results["reference"] is None
    command = shlex.join(["mame-sd-eval", *given])
    assert results["manifest"]["command"] == command
    assert command in (out / "report.md").read_text(encoding="utf-8")
    assert "2 prompts (demo.txt), 1 step, seed 0, model tiny" in results["notes"][0]
    assert command_again(["benchmark", "--out=x", "--prompts", "a b"]) == "mame-sd-eval benchmark --prompts 'a b'"


def test_suites_find_their_prompts(tmp_path: Path) -> None:
    quick, file = suite_prompts(SUITES["quick"], None, None)
    assert len(quick) == 12
    assert file is not None
    assert file["name"] == "demo.txt"
    drawn, _ = suite_prompts(SUITES["embedded"], None, None)
    assert len(drawn) == 128
    assert all(prompt.text in subjects_by_caption() for prompt in [*quick, *drawn])
    (tmp_path / "own.txt").write_text("a\nb\nc\n")
    assert [p.text for p in suite_prompts(SUITES["paper"], str(tmp_path / "own.txt"), 2)[0]] == ["a", "b"]
    with pytest.raises(UserError, match="--suite paper: expected --prompts FILE, got none"):
        suite_prompts(SUITES["paper"], None, None)
    with pytest.raises(UserError, match="--num: expected at least 1"):
        suite_prompts(SUITES["quick"], None, 0)


@pytest.mark.skipif(os.name != "posix", reason="needs several processes on one machine")
def test_two_processes_make_the_same_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("key\nant\nstar\n")
    model_folder = save_tiny_pipeline(tmp_path / "like-sdxl", **LIKE_SDXL)  # tomesd can do nothing with it
    options = ["benchmark", "--model", str(model_folder), "--device", "cpu", "--offline", "--steps", "1"]
    options += [
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--height",
        "128",
        "--width",
        "128",
        "--rows",
        "tomesd-50,mame-default",
        "--rounds",
        "1",
    ]
    options += ["--weights-dir", str(tmp_path), "--out"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--main_process_port", "0", "-m", "mame_sd.eval", *options, str(tmp_path / "two")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(launch, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report.html") == 1
    assert cli.run([*options, str(tmp_path / "one")]) == 0
    one, two = rows_of(tmp_path / "one"), rows_of(tmp_path / "two")
    for name in ("baseline", "mame-default"):
        assert snapshot(tmp_path / "one" / "runs" / name) == snapshot(tmp_path / "two" / "runs" / name)
        assert one[name]["per_image"] == two[name]["per_image"]
    assert [row["status"] for row in two.values()] == ["measured", "not measured", "measured"]
    assert one["tomesd-50"]["reason"] == two["tomesd-50"]["reason"] != ""
    found = set(one["mame-default"]["per_image"]) - {"lpips"}  # where its weights lie in the cache
    assert found == {"psnr", "ssim"}  # no ground truth for such prompts


def test_prompt_ids_need_not_be_in_order_and_small_images_lack_what_they_are_too_small_for(
    model: LoadedModel, tmp_path: Path
) -> None:
    metrics = [METRICS["psnr"], METRICS["ms_ssim"]]
    prompts = [Prompt(id=name, text=text.text) for name, text in zip("zay", PROMPTS, strict=True)]
    results = benchmark(model, tmp_path, prompts=prompts, methods=tiny_methods()[::3], metrics=metrics, rounds=1).run()
    assert list(results["rows"][1]["per_image"]["psnr"]) == ["z_0", "a_0", "y_0"]
    assert "needs 176 x 176" in results["rows"][1]["values"]["ms_ssim"]["withheld"]
