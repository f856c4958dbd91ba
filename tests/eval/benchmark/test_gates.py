"""The sanity gates: they pass where they should, and each of them can fail."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import pytest

from mame_sd.eval.benchmark.gates import ceiling_gate, unrelated_pairs
from mame_sd.eval.cli import app as cli
from mame_sd.eval.cli.benchmark import command_again
from mame_sd.eval.metric_list import METRICS
from mame_sd.eval.metrics.lpips import Lpips
from mame_sd.eval.results.schema import Value
from mame_sd.eval.scoring.per_image import pair_values
from mame_sd.eval.scoring.runs import Run
from mame_sd.eval.scoring.tools import Tools
from tests.builders import seeded
from tests.builders.benchmarks import results_of
from tests.builders.metrics import oracle
from tests.builders.run_folders import forget_hashes, write_run


def test_the_ceiling_gate_fails_when_any_method_is_as_far_as_another_prompt(tmp_path: Path) -> None:
    shapes = oracle("lpips")["alex"]["shapes"]
    network = Lpips("alex", seeded.weights({name: tuple(shape) for name, shape in shapes.items()}))
    pictures = {f"{n}_0": seeded.picture(f"ceiling {n}", 64, 64) for n in range(3)}
    baseline = Run.open(write_run(tmp_path / "run", pictures))
    tools = Tools(networks={"lpips-alex": network})
    metrics = [METRICS["psnr"], METRICS["lpips"]]
    unrelated = pair_values(metrics, unrelated_pairs(baseline), tools)
    ceiling = {name: sum(values.values()) / 3 for name, values in unrelated.items()}

    def passes(**factors: float) -> bool:
        """With one method that equals the baseline, and one at so many times the ceiling."""
        equal = {"psnr": Value(mean=math.inf), "lpips": Value(mean=0.0)}
        other = {name: Value(mean=ceiling[name] * factor) for name, factor in factors.items()}
        gate = ceiling_gate(baseline, [METRICS[name] for name in factors], [equal, other], tools)
        assert gate is not None
        return gate.passed

    assert passes(psnr=1.1, lpips=0.9)
    assert not passes(psnr=0.9, lpips=0.9)
    assert not passes(psnr=1.1, lpips=1.1)
    for name in ceiling:
        assert not passes(**{name: 1.0})


def test_a_report_names_its_command_and_every_gate_can_fail(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "two words"
    words = "benchmark --offline --num 2 --steps 1 --rows mame-default --rounds 1 --height 64"
    given = [*words.split(), "--width", "64", "--model", str(model_folder), "--device", "cpu"]
    assert cli.run([*given, "--out", str(out)]) == 0, capsys.readouterr().err
    results = results_of(out)
    assert "reference" not in results
    command = shlex.join(["mame-sd-eval", *given])
    assert results["manifest"]["command"] == command
    assert command in (out / "report.html").read_text(encoding="utf-8")
    assert "2 prompts (drawn with seed 0), 1 step, seed 0, model tiny" in results["notes"][0]
    assert (
        command_again(["benchmark", "--out=x", "--prompts", "a b"])
        == "mame-sd-eval benchmark --prompts 'a b'"
    )
    assert (out / "bench-busy.jsonl").exists(), "one round tells nothing: the next start times anew"
    images = sorted((out / "runs" / "baseline" / "images").iterdir())
    forget_hashes(out / "runs" / "baseline")
    images[0].write_bytes(
        images[1].read_bytes()
    )  # not what the baseline makes, and no other prompt's image differs
    assert cli.run([*given, "--out", str(out)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "sanity gates failed (baseline against itself, inactive merging" in error
    assert "unrelated pairing" in error
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "3 of 4 sanity gates failed" in page
