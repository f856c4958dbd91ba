"""The tables in every format: blocks, best values, reasons, intervals, p-values."""

from __future__ import annotations

import csv
import io
import math
import re
from pathlib import Path

import pytest

from mame_sd.eval.report import markdown, render
from mame_sd.eval.report.numbers import number
from mame_sd.eval.report.select import focus
from mame_sd.eval.report.tables import fidelity_table, quality_table
from mame_sd.eval.results.read import parse
from tests.builders.report_example import row
from tests.builders.report_page import Elements, Results


def test_the_blocks_never_mix(page: str) -> None:
    tables = Elements(page).tables
    fidelity, quality = tables["table-fidelity"], tables["table-quality"]
    for name in ("LPIPS", "PSNR", "Latency", "Times as fast"):
        assert name in fidelity
        assert name not in quality
    assert "Peak memory" in tables["table-cost"]
    assert "Peak memory" not in fidelity
    for name in ("Retrieval", "FID"):
        assert name in quality
        assert name not in fidelity
    assert "Quality against drawn glyphs" in quality
    assert quality.count("N = 4, needs 100") == 4
    assert "not measured: tomesd is not installed: pip install 'mame-sd[rivals]'" in quality
    assert "not measured" in fidelity


def best_rows(results: Results, key: str) -> set[str]:
    parsed = parse(results)
    found = set()
    for table in (fidelity_table(parsed, focus(parsed)), quality_table(parsed, focus(parsed))):
        for line in table.lines:
            found |= {
                line.row.name
                for m, cell in zip(table.metrics, line.cells, strict=False)
                if m.name == key and cell.best
            }
    return found


def test_best_values_follow_the_direction(results: Results) -> None:
    assert best_rows(results, "latency") == {"mame-default"}
    assert best_rows(results, "speedup") == {"mame-default"}
    assert best_rows(results, "lpips") == {"mame-default"}
    assert best_rows(results, "psnr") == {"mame-default"}
    row(results, "psnr", "metrics")["better"] = "lower"
    assert best_rows(results, "psnr") == {"tomesd-50"}


def test_values_that_read_the_same_are_best_together_and_a_column_of_one_value_has_no_best(
    results: Results,
) -> None:
    row(results, "tomesd-50")["values"]["latency"]["mean"] = 2.5001
    assert best_rows(results, "latency") == {"tomesd-50", "mame-default"}
    for entry in results["rows"]:
        entry["values"]["memory"] = {"mean": 100.0}
    assert best_rows(results, "memory") == set()
    assert best_rows(results, "fid") == set()


def test_set_wide_values_say_how_they_mislead_in_every_format(
    tmp_path: Path, unplotted: Results
) -> None:
    results = unplotted
    warning = "N = 128, below 2,048: biased upward"
    for n, entry in enumerate(results["rows"]):
        if entry["measured"]:
            spread = {"std": 0.5, "splits": 10}
            entry["values"]["fid"] = {"mean": 30.0 + n, "n": 128, "warning": warning, **spread}
            entry["values"]["retrieval"] = {"mean": 3.0, "n": 128, "splits": 1, "cap": 128}
            difference = {"mean": None, "p": None, "note": "no p-value: infinite values"}
            entry["values"]["retrieval"]["difference"] = difference
    text = render(parse(results), tmp_path).read_text(encoding="utf-8")
    spread = "10 splits; ± is the standard deviation over them"
    assert text.count(f"FID: {warning}; {spread}") == 1
    said = "no p-value: infinite values; 1 split; at most 128"
    assert text.count(f"Retrieval: {said}") == 1
    assert "± 0.50" in Elements(text).tables["table-quality"]
    for name in ("report.md", "table.csv"):
        assert (tmp_path / name).read_text(encoding="utf-8").count(warning) == (
            4 if name == "table.csv" else 1
        )
        assert said in (tmp_path / name).read_text(encoding="utf-8")


def test_a_mean_without_the_equal_images_says_so_and_beats_nothing(
    tmp_path: Path, unplotted: Results
) -> None:
    results = unplotted
    row(results, "mame-tau-0.8")["values"]["psnr"] |= {"mean": 99.0, "n": 4, "equal": 1}
    assert best_rows(results, "psnr") == set()
    text = render(parse(results), tmp_path).read_text(encoding="utf-8")
    assert "1 of 4 equal" in Elements(text).tables["table-fidelity"]
    for name in ("report.md", "table.csv"):
        assert "1 of 4 equal" in (tmp_path / name).read_text(encoding="utf-8")
    row(results, "mame-tau-0.8")["values"]["psnr"] |= {
        "mean": math.inf,
        "low": None,
        "high": None,
        "equal": 4,
    }
    assert best_rows(results, "psnr") == {"mame-tau-0.8"}


def test_p_values_name_the_row_they_compare_with(page: str) -> None:
    assert page.count("p of the paired sign-flip test against ToMeSD 50 %") == 1
    assert "p 0.031" in Elements(page).tables["table-fidelity"]


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.0114, 3, "0.011"),
        (0.0004, 3, "<0.001"),
        (0, 3, "0.000"),
        (-1.25, 1, "−1.2"),
        (-0.00001, 3, ">−0.001"),
        (math.inf, 1, "∞"),
        (1210, 0, "1210"),
    ],
)
def test_numbers(value: float, digits: int, text: str) -> None:
    assert number(value, digits) == text


def test_csv_holds_every_figure(written: Path, results: Results) -> None:
    lines = list(csv.DictReader(io.StringIO((written / "table.csv").read_text(encoding="utf-8"))))
    assert [line["name"] for line in lines] == [entry["name"] for entry in results["rows"]]
    for line, entry in zip(lines, results["rows"], strict=True):
        for key, value in entry["values"].items():
            for part in ("low", "high", "n", "p", "withheld"):
                assert line[f"{key}_{part}"] == (
                    "" if value.get(part) is None else str(value[part])
                )
            assert line[key] == ("" if value.get("mean") is None else str(value["mean"]))
    assert lines[1]["status"] == "not measured"
    assert lines[4]["speedup"] == "1.6"


def test_markdown_tables_are_whole_and_prompts_are_text(tmp_path: Path, unplotted: Results) -> None:
    results = unplotted
    row(results, "tomesd-50")["label"] = "a | b"
    render(parse(results), tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table
    assert "<script>" not in text
    assert markdown.escape("<i>a|b*</i>") == r"&lt;i&gt;a\|b\*&lt;/i&gt;"
    shown = re.findall(r"!\[[^\]]*\]\(<([^>]+)>\)", text)
    assert len(shown) == 9
    assert all((tmp_path / name).is_file() for name in shown)
