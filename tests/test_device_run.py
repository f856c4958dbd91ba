"""The run for a graphics card, rehearsed on the processor at tiny sizes."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from scripts import device_run
from scripts.device_run import STEPS, Run, go

CPU = torch.device("cpu")


def test_the_run_is_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["machine", "near float32", "near layers", "SD 1.5 at 512", "attention", "block"]
    chosen += ["launches", "FLUX.1 at 1024", "Wan 2.1 14B, 480p, compiled", "tests"]
    command = ["--device", "cpu", "--tiny", "--out", str(tmp_path), "--only", *chosen]
    assert device_run.main(command) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert found["lines"] == lines
    assert found["failed"] == []
    done = [line["step"] for line in lines if line["what"] == "done"]
    assert done == [name for name in STEPS if name in chosen]
    near = [line for line in lines if line["what"] == "near"]
    assert len(near) == 4 + 3 * 2
    assert all(line["right"] for line in near)
    merged = [
        line["rows"]["keep .25"]["merged"].split(" of ")[0]
        for line in lines
        if line["what"] == "model"
    ]
    assert len(merged) == 2
    assert "0" not in merged
    ways = [line["ms"] for line in lines if line["what"] in ("attention", "block")]
    assert all(len(way["native"]) == 3 for way in ways)
    assert all(isinstance(way["cudnn"], str) for way in ways), "a reason, on a processor"
    said = capsys.readouterr().out.splitlines()
    assert said[-2].startswith("| Wan 2.1 14B, 480p | ")
    assert json.loads(said[-1])["failed"] == []


def test_a_step_that_fails_or_has_no_time_left_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(run: Run) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setitem(STEPS, "breaks", (5, breaks))
    monkeypatch.setitem(STEPS, "works", (5, lambda run: run.note("found", x=1)))
    run = Run(tmp_path, CPU, tiny=True)
    go(run, ["breaks", "works"])
    said = [(line["step"], line["what"]) for line in run.lines]
    assert said == [("breaks", "failed"), ("breaks", "done"), ("works", "found"), ("works", "done")]
    assert run.lines[0]["why"] == "RuntimeError: out of memory"
    run.seconds = 0
    go(run, ["works"])
    assert run.lines[-1]["what"] == "left out"


def test_a_step_over_its_budget_begins_a_process_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = threading.Event()
    monkeypatch.setitem(STEPS, "hangs", (0.01, lambda run: stopped.wait(30)))
    went = []

    def restart(step: str) -> None:
        went.append(step)
        stopped.set()

    run = Run(tmp_path, CPU, tiny=True)
    go(run, ["hangs"], restart)
    assert went == ["hangs"]
    assert run.lines[0]["what"] == "failed"
    assert run.lines[0]["why"].startswith("stopped after 0 s")
