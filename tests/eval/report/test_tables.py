"""The tables: blocks, best values, reasons, intervals, p-values."""

from __future__ import annotations

import math
from pathlib import Path

from mame_sd.eval.report import render
from mame_sd.eval.report.numbers import number
from mame_sd.eval.report.tables import every_table
from tests.builders.report_example import NO_TOMESD, Elements, Results, parsed, row


def test_the_blocks_never_mix(page: str) -> None:
    tables = Elements(page).tables
    fidelity, quality = tables["table-fidelity"], tables["table-quality"]
    for name in ("LPIPS", "Times as fast"):
        assert name in fidelity
        assert name not in quality
    assert "Latency" in tables["table-cost"]
    assert "FID" in quality
    assert "FID" not in fidelity
    assert quality.count("N = 4, needs 100") == 4
    assert f"not measured: {NO_TOMESD}" in quality
    assert "p 0.031" in fidelity


def best_rows(results: Results, key: str) -> set[str]:
    found = parsed(results)
    return {
        line.row.name
        for table in every_table(found)
        for line in table.lines
        for metric, cell in zip(table.metrics, line.cells, strict=False)
        if metric.name == key and cell.best
    }


def test_best_values_follow_the_direction_and_equal_ones_are_best_together(
    results: Results,
) -> None:
    for key in ("latency", "speedup", "lpips", "psnr"):
        assert best_rows(results, key) == {"mame-default"}
    row(results, "psnr", "metrics")["better"] = "lower"
    assert best_rows(results, "psnr") == {"tomesd-50"}
    row(results, "tomesd-50")["values"]["latency"]["mean"] = 2.5001
    assert best_rows(results, "latency") == {"tomesd-50", "mame-default"}
    row(results, "tomesd-50")["family"] = "floor"
    assert best_rows(results, "latency") == {"mame-default"}
    for entry in results["rows"]:
        entry["values"]["memory"] = {"mean": 100.0}
    assert best_rows(results, "memory") == set(), "a column of one value"
    assert best_rows(results, "fid") == set()


def test_values_say_how_they_mislead(tmp_path: Path, unplotted: Results) -> None:
    results = unplotted
    warning = "N = 128, below 2,048: biased upward"
    for n, entry in enumerate(results["rows"]):
        if entry["measured"]:
            spread = {"std": 0.5, "splits": 10}
            entry["values"]["fid"] = {"mean": 30.0 + n, "n": 128, "warning": warning, **spread}
            entry["values"]["clip_score"] = {"mean": 3.0, "n": 128, "splits": 1, "cap": 128}
            difference = {"mean": None, "p": None, "note": "no p-value: infinite values"}
            entry["values"]["clip_score"]["difference"] = difference
    row(results, "mame-tau-0.8")["values"]["psnr"] |= {"mean": 99.0, "n": 4, "equal": 1}
    assert best_rows(results, "psnr") == set(), "a mean without the equal images beats nothing"
    text = render(parsed(results), tmp_path).read_text(encoding="utf-8")
    spread = "10 splits; ± is the standard deviation over them"
    assert text.count(f"FID: {warning}; {spread}") == 1
    said = "no p-value: infinite values; 1 split; at most 128"
    assert text.count(f"CLIP score: {said}") == 1
    tables = Elements(text).tables
    assert "± 0.50" in tables["table-quality"]
    assert "1 of 4 equal" in tables["table-fidelity"]
    every = {"mean": math.inf, "low": None, "high": None, "equal": 4}
    row(results, "mame-tau-0.8")["values"]["psnr"] |= every
    assert best_rows(results, "psnr") == {"mame-tau-0.8"}


def test_numbers() -> None:
    values = (0.0114, 0.0004, 0, -1.25, -0.00001, math.inf, 1210)
    said = ["0.011", "<0.001", "0.000", "−1.250", ">−0.001", "∞", "1210.000"]
    assert [number(value, 3) for value in values] == said
