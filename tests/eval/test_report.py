"""The report: what it says of good, bad and missing results, in every format, and that nothing in it can be executed."""

from __future__ import annotations

import copy
import csv
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mame_sd.eval.report import frontier, latex, markdown, pictures, render
from mame_sd.eval.report.data import Metric, Row, Value, parse
from mame_sd.eval.report.headline import comparison, headline
from mame_sd.eval.report.kept_plot import describe, merging_levels
from mame_sd.eval.report.numbers import interval, number, p_value
from mame_sd.eval.report.render import table_csv
from mame_sd.eval.report.select import cases, focus
from mame_sd.eval.report.tables import fidelity_table, quality_table
from markupsafe import escape
from PIL import Image

from mame_sd.errors import UserError
from tests.builders.report_example import PROMPTS, example, row

Results = dict[str, Any]
CSS = (Path(__file__).parents[2] / "eval" / "report" / "templates" / "report.css").read_text(encoding="utf-8")


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return example(tmp_path)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    return render(example(folder), folder).read_text(encoding="utf-8")


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of each table by its id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, str] = {}
        self._table: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self._table = dict(attrs)["id"]

    def handle_endtag(self, tag: str) -> None:
        self._table = None if tag == "table" else self._table

    def handle_data(self, data: str) -> None:
        if self._table is not None:
            self.tables[self._table] = self.tables.get(self._table, "") + data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def says(results: Results) -> str:
    parsed = parse(results)
    return headline(focus(parsed))


# --- one file, nothing executable, nothing fetched


def test_nothing_is_fetched(page: str) -> None:
    elements = Elements(page)
    addresses = [
        value for _, attrs in elements.tags for name, value in attrs.items() if name in ("src", "href") and value
    ]
    outside = [a for a in addresses if not a.startswith(("data:", "#"))]
    assert outside == []
    assert "url(" not in CSS
    assert "@import" not in CSS
    policy = next(a["content"] for a in elements.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:;")


def test_prompts_are_text(page: str) -> None:
    elements = Elements(page)
    assert len(elements.all("script")) == 1
    assert all("onerror" not in attributes for _, attributes in elements.tags)
    assert all((image["src"] or "").startswith("data:") for image in elements.all("img"))
    for prompt in PROMPTS:
        assert str(escape(prompt)) in page
    assert "<b>that is</b>" not in page
    assert "{{ 7 * 7 }}" in page


def test_every_picture_and_plot_has_words(page: str) -> None:
    elements = Elements(page)
    shots = [attrs for attrs in elements.all("button") if attrs.get("class") == "shot"]
    assert len(shots) == 3 * 5 + 4 * 4  # three cases with two maps each, and the gallery of four prompts and four rows
    assert all((attrs["aria-label"] or "").startswith("Enlarge: ") for attrs in shots)
    assert all(image["alt"] for image in elements.all("img")[:-1])  # the last is the dialog's, filled by the script
    plots = [attrs["aria-label"] or "" for attrs in elements.all("svg")]
    assert len(plots) == 4  # frontier and tokens kept, for wide and narrow screens
    assert "MaMe (default) 1.60 times as fast" in plots[0]
    assert "MaMe (default) keeps 30 to 70 % of 4,096 at level 0, 30 to 70 % of 1,024 at level 1." in plots[2]


def test_ids_are_unique_and_plots_take_the_colors_of_the_page(page: str) -> None:
    elements = Elements(page)
    ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    svgs = "".join(re.findall(r"<svg.*?</svg>", page, re.S))
    assert re.findall(r"#[0-9a-f]{6}\b", svgs) == []
    assert "font-family" not in svgs
    used = set(re.findall(r"var\(--([a-z]+)\)", svgs))
    schemes = CSS.split("@media (prefers-color-scheme: dark)")
    for scheme in schemes[:2]:
        assert used <= set(re.findall(r"--([a-z]+):", scheme))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_stands_out_from_its_ground(scheme: int) -> None:
    colors = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", CSS.split("@media (prefers-color-scheme: dark)")[scheme]))
    pairs = [(ink, ground) for ink in ("ink", "muted") for ground in ("paper", "raised", "wash", "best")]
    pairs += [(ink, ground) for ink in ("mame", "tomesd", "baseline", "good", "bad") for ground in ("paper", "raised")]
    pairs += [("mame", "best")]
    assert {
        pair: contrast(*(colors[name] for name in pair)) for pair in pairs if contrast(*(colors[n] for n in pair)) < 4.5
    } == {}


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio of two #rrggbb colours."""
    lights = []
    for color in (one, other):
        channels = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def test_the_same_results_give_the_same_bytes(tmp_path: Path, results: Results) -> None:
    names = ("report.html", "report.md", "table.csv", "table.tex")
    assert render(results, tmp_path) == tmp_path / "report.html"
    first = [(tmp_path / name).read_bytes() for name in names]
    render(results, tmp_path)
    assert [(tmp_path / name).read_bytes() for name in names] == first
    assert {path.name for path in tmp_path.iterdir()} == {*names, "runs"}


# --- the headline


def test_headline_of_a_faster_row(results: Results) -> None:
    assert re.fullmatch(
        r"MaMe \(default\) is 1\.60 times as fast as the baseline, at an LPIPS of 0\.\d{3}\.", says(results)
    )
    parsed = parse(results)
    assert comparison(parsed, focus(parsed)).startswith(
        "ToMeSD 50 % is 1.25 times as fast as the baseline, at an LPIPS of"
    )


def test_headline_of_a_value_too_small_to_print(results: Results) -> None:
    row(results, "mame-default")["values"]["lpips"]["mean"] = 0.0002
    assert says(results).endswith("times as fast as the baseline, at an LPIPS below 0.001.")


def test_headline_of_a_slower_row(results: Results) -> None:
    row(results, "mame-default")["values"]["latency"] = {"mean": 8.0, "low": 7.9, "high": 8.1}
    assert "is slower than the baseline (0.50 times as fast), at an LPIPS" in says(results)


def test_headline_claims_nothing_within_the_noise(results: Results) -> None:
    row(results, "mame-default")["values"]["latency"] = {"mean": 3.8, "low": 3.0, "high": 4.5}
    assert "is not measurably faster or slower than the baseline (1.05 times as fast)" in says(results)
    row(results, "mame-default")["values"]["latency"] |= {"p": 0.01, "against": "baseline"}
    assert "is 1.05 times as fast" in says(results)
    row(results, "mame-default")["values"]["latency"] |= {"against": "tomesd-50"}  # says nothing about the baseline
    assert "is not measurably faster" in says(results)


def test_headline_without_speed_without_lpips_and_without_mame(results: Results) -> None:
    for entry in results["rows"]:
        entry["values"].pop("latency", None)
    assert says(results).startswith("MaMe (default): speed was not measured; at an LPIPS of ")
    for entry in results["rows"]:
        entry["values"].pop("lpips", None)
    assert "at a PSNR of " in says(results)
    for entry in results["rows"]:
        entry["values"].pop("psnr", None)
    assert says(results).endswith("neither was its distance from the baseline.")
    results["rows"] = results["rows"][:1]
    assert says(results) == "No run with MaMe has been measured yet."


def test_tomesd_that_was_not_measured_is_named(tmp_path: Path, results: Results) -> None:
    row(results, "tomesd-50").update(status="not measured", values={}, per_image={}, reason="no <tomesd>")
    text = render(results, tmp_path).read_text(encoding="utf-8")
    assert "ToMeSD was not measured: tomesd is not installed: pip install mame-sd[peers]." in text
    assert text.count("not measured: no &lt;tomesd&gt;") == 2  # in both tables
    assert "--columns: 3" in text


# --- the tables


def test_the_blocks_never_mix(page: str) -> None:
    tables = Elements(page).tables
    fidelity, quality = tables["table-fidelity"], tables["table-quality"]
    for name in ("LPIPS", "PSNR", "Latency", "Peak memory", "Times as fast"):
        assert name in fidelity
        assert name not in quality
    for name in ("Retrieval", "FID"):
        assert name in quality
        assert name not in fidelity
    assert "Quality against drawn glyphs" in quality
    assert quality.count("N = 4, needs 100") == 4
    assert "not measured: tomesd is not installed: pip install mame-sd[peers]" in quality
    assert "not measured" in fidelity


def best_rows(results: Results, key: str) -> set[str]:
    parsed = parse(results)
    found = set()
    for table in (fidelity_table(parsed, focus(parsed)), quality_table(parsed, focus(parsed))):
        for line in table.lines:
            found |= {
                line.row.name for m, cell in zip(table.metrics, line.cells, strict=False) if m.key == key and cell.best
            }
    return found


def test_best_values_follow_the_direction(results: Results) -> None:
    assert best_rows(results, "latency") == {"mame-default"}
    assert best_rows(results, "speedup") == {"mame-default"}
    assert best_rows(results, "lpips") == {"mame-default"}
    assert best_rows(results, "psnr") == {"mame-default"}
    results["metrics"]["psnr"]["better"] = "lower"
    assert best_rows(results, "psnr") == {"tomesd-50"}


def test_values_that_read_the_same_are_best_together_and_a_column_of_one_value_has_no_best(results: Results) -> None:
    row(results, "tomesd-50")["values"]["latency"]["mean"] = 2.5001
    assert best_rows(results, "latency") == {"tomesd-50", "mame-default"}
    for entry in results["rows"]:
        entry["values"]["memory"] = {"mean": 100.0}
    assert best_rows(results, "memory") == set()
    assert best_rows(results, "fid") == set()


def test_a_long_reason_stands_below_the_table_once(tmp_path: Path, results: Results) -> None:
    reason = "not measured: expected the weights of a network somewhere, found none; get them with some command"
    for entry in results["rows"]:
        entry["values"]["fid"] = {"mean": None, "withheld": reason}
    text = render(results, tmp_path).read_text(encoding="utf-8")
    assert text.count("FID: expected the weights of a network somewhere") == 1
    assert "needs 100" not in text
    assert "withheld" not in Elements(text).tables["table-quality"]
    assert (tmp_path / "table.tex").read_text().count("FID: not measured (expected the weights") == 1
    assert (tmp_path / "report.md").read_text().count("FID: expected the weights") == 1


def test_set_wide_values_say_how_they_mislead_in_every_format(tmp_path: Path, results: Results) -> None:
    warning = "N = 128, below 2,048: biased upward"
    for n, entry in enumerate(results["rows"]):
        if entry["status"] == "measured":
            spread = {"std": 0.5, "subsets": 100, "subset_size": 50}
            entry["values"]["fid"] = {"mean": 30.0 + n, "n": 128, "warning": warning, **spread}
            entry["values"]["retrieval"] = {"mean": 3.0, "n": 128, "splits": 1, "cap": 128}
    text = render(results, tmp_path).read_text(encoding="utf-8")
    subsets = "100 subsets of 50 images; ± is the standard deviation over them"
    assert text.count(f"FID: {warning}; {subsets}") == 1
    assert text.count("Retrieval: 1 split; at most 128") == 1
    assert "± 0.50" in Elements(text).tables["table-quality"]
    for name in ("report.md", "table.tex", "table.csv"):
        assert (tmp_path / name).read_text(encoding="utf-8").count(warning) == (4 if name == "table.csv" else 1)
        assert "1 split; at most 128" in (tmp_path / name).read_text(encoding="utf-8")
    assert r"{\scriptsize $\pm$ 0.50}" in (tmp_path / "table.tex").read_text(encoding="utf-8")


def test_why_an_interval_or_a_p_value_is_missing_is_said_in_every_format(tmp_path: Path, results: Results) -> None:
    for entry in results["rows"]:
        if entry["values"] and entry["family"] != "baseline":
            entry["values"]["lpips"]["note"] = "no interval: one prompt, needs two"
            entry["values"]["psnr"]["difference"] = {"mean": None, "p": None, "note": "no p-value: infinite values"}
    render(results, tmp_path)
    for name in ("report.html", "report.md", "table.tex", "table.csv"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert text.count("no interval: one prompt, needs two") == (3 if name == "table.csv" else 1), name
        assert text.count("no p-value: infinite values") == (3 if name == "table.csv" else 1), name


def test_tokens_kept_say_what_they_were_counted_on(tmp_path: Path, results: Results) -> None:
    for entry in results["rows"]:
        if entry["family"] == "mame":
            entry["kept"] = [{"step": step, "level": 0, "tokens": 64, "kept": 32 + step} for step in range(3)]
    render(results, tmp_path)
    for name in ("report.html", "report.md"):
        assert "Counted on one image, that of the first prompt." in (tmp_path / name).read_text(encoding="utf-8")


def test_a_mean_without_the_equal_images_says_so_and_beats_nothing(tmp_path: Path, results: Results) -> None:
    row(results, "mame-tau-0.8")["values"]["psnr"] |= {"mean": 99.0, "n": 4, "equal": 1}
    assert best_rows(results, "psnr") == set()
    text = render(results, tmp_path).read_text(encoding="utf-8")
    assert "1 of 4 equal" in Elements(text).tables["table-fidelity"]
    for name in ("report.md", "table.tex", "table.csv"):
        assert "1 of 4 equal" in (tmp_path / name).read_text(encoding="utf-8")
    row(results, "mame-tau-0.8")["values"]["psnr"] |= {"mean": math.inf, "low": None, "high": None, "equal": 4}
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


def test_intervals_and_p_values() -> None:
    assert interval(Value(1, 0.5, 2), 1) == "0.5 – 2.0"
    assert interval(Value(1), 1) == ""
    assert [p_value(Value(p=p)) for p in (None, 0.0001, 0.031, 0.5)] == ["", "p < 0.001", "p 0.031", "p 0.50"]


def test_csv_holds_every_figure(tmp_path: Path, results: Results) -> None:
    render(results, tmp_path)
    lines = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text(encoding="utf-8"))))
    assert [line["name"] for line in lines] == [entry["name"] for entry in results["rows"]]
    for line, entry in zip(lines, results["rows"], strict=True):
        for key, value in entry["values"].items():
            for part in ("low", "high", "n", "p", "withheld"):
                assert line[f"{key}_{part}"] == ("" if value.get(part) is None else str(value[part]))
            assert line[key] == ("" if value["mean"] is None else str(value["mean"]))
    assert lines[1]["status"] == "not measured"
    assert lines[4]["speedup"] == "1.6"


def test_latex_is_the_table_of_the_paper(tmp_path: Path, results: Results) -> None:
    row(results, "mame-default")["label"] = "MaMe_100 % & τ {x}"
    render(results, tmp_path)
    text = (tmp_path / "table.tex").read_text(encoding="utf-8")
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")]
    lines = [line for line in body.splitlines() if "&" in line]
    columns = text[text.index("{@{}l") :].split("}}")[0].count("c")
    assert columns == 5  # latency, times as fast, LPIPS, PSNR, retrieval: memory and FID hold no value
    assert [len(re.findall(r"(?<!\\)&", line)) for line in lines] == [columns] * 9  # four rows have intervals below
    assert body.count(r"\rowcolor") == 4
    assert r"MaMe\_100 \% \& $\tau$ \{x\} & \textbf{2.50} & \textbf{1.60} & \textbf{0." in body
    assert r" & {\scriptsize 2.40 -- 2.60} &  & {\scriptsize 0." in body
    assert len(re.findall(r"(?<!\\)\{", text)) == len(re.findall(r"(?<!\\)\}", text))
    assert r"\multicolumn{2}{c}{Fidelity to the baseline} & \multicolumn{1}{c}{Quality against drawn glyphs}" in text
    assert "FID: withheld (N = 4, needs 100)." in text
    assert "pip install mame-sd[peers]" in text


def test_markdown_tables_are_whole_and_prompts_are_text(tmp_path: Path, results: Results) -> None:
    row(results, "tomesd-50")["label"] = "a | b"
    render(results, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table
    assert "<script>" not in text
    assert markdown.escape("<i>a|b*</i>") == r"&lt;i&gt;a\|b\*&lt;/i&gt;"
    shown = re.findall(r"!\[[^\]]*\]\(<([^>]+)>\)", text)
    assert len(shown) == 9
    assert all((tmp_path / name).is_file() for name in shown)
    assert latex.escape("50 % of a_b\\") == r"50 \% of a\_b\textbackslash{}"


# --- the plots


def points(pairs: list[tuple[float, float]]) -> list[frontier.Point]:
    empty = Row("r", "r", "mame", False, None, None, True)
    return [frontier.Point(empty, speed, distance) for speed, distance in pairs]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=12), st.booleans())
def test_nothing_surpasses_the_frontier(pairs: list[tuple[float, float]], lower: bool) -> None:
    found = points(pairs)
    best = frontier.frontier(found, lower)
    sign = 1 if lower else -1

    def surpasses(a: frontier.Point, b: frontier.Point) -> bool:
        at_least = a.speed >= b.speed and sign * a.closeness <= sign * b.closeness
        return at_least and (a.speed, a.closeness) != (b.speed, b.closeness)

    kept = {(p.speed, p.closeness) for p in best}
    assert kept == {(p.speed, p.closeness) for p in found if not any(surpasses(other, p) for other in found)}
    assert [p.speed for p in best] == sorted({p.speed for p in best})


def test_points_are_rows_with_both_figures(results: Results) -> None:
    parsed = parse(results)
    found = {p.row.name: p for p in frontier.points(parsed, focus(parsed))}
    assert set(found) == {"baseline", "tomesd-50", "mame-tau-0.8", "mame-default"}
    assert (found["baseline"].speed, found["baseline"].closeness) == (1, 0)
    assert found["mame-default"].speed_interval == pytest.approx((4 / 2.6, 4 / 2.4))
    row(results, "mame-default")["values"]["lpips"]["mean"] = math.inf
    parsed = parse(results)
    assert len(frontier.points(parsed, focus(parsed))) == 3


def test_kept_tokens_leave_out_levels_that_do_not_merge(results: Results) -> None:
    merging = merging_levels(next(r for r in parse(results).rows if r.name == "mame-default"))
    assert list(merging) == [0, 1]
    assert merging[0][1] == pytest.approx({0: 0.3, 1: 0.5, 2: 0.7})
    assert describe("x", {0: (4096, {0: 0.375, 1: 0.375})}) == "x keeps 38 % of 4,096 at level 0."


def test_plots_that_cannot_be_drawn_are_explained(tmp_path: Path, results: Results) -> None:
    for entry in results["rows"]:
        entry.update(kept=[])
        entry["values"].pop("latency", None)
    text = render(results, tmp_path).read_text(encoding="utf-8")
    assert "<svg" not in text
    assert "Not counted in this run." in text
    assert "This plot needs the speed and the closeness of at least two rows" in text


# --- the pictures


def test_cases_are_the_closest_the_median_and_the_furthest(results: Results) -> None:
    def picked() -> list[tuple[str, str]]:
        parsed = parse(results)
        return cases(parsed, focus(parsed))

    scores = row(results, "mame-default")["per_image"]["lpips"]
    ranked = sorted(scores, key=scores.__getitem__)
    assert picked() == [("best", ranked[0]), ("median", ranked[2]), ("worst", ranked[3])]
    for entry in results["rows"]:
        entry["values"].pop("lpips", None)  # PSNR takes its place, where higher is closer
    assert picked() == [("best", ranked[0]), ("median", ranked[2]), ("worst", ranked[3])]
    results["images"] = {key: results["images"][key] for key in ranked[:2]}
    assert picked() == [("best", ranked[0]), ("worst", ranked[1])]
    results["images"] = {key: results["images"][key] for key in ranked[:1]}
    assert picked() == [("only", ranked[0])]
    row(results, "mame-default")["per_image"] = {}
    assert picked() == [("", ranked[0])]


def test_difference_maps() -> None:
    one = Image.new("RGB", (4, 2), (10, 20, 30))
    other = Image.new("RGB", (4, 2), (10, 26, 33))
    values = pictures.difference(one, other)
    assert values.shape == (2, 4)
    assert np.unique(values).tolist() == [3.0]
    black, bright = (np.asarray(pictures.difference_map(np.full((1, 1), level), 8))[0, 0] for level in (0.0, 8.0))
    assert black.sum() < 5
    assert bright.sum() > 600
    assert (np.asarray(pictures.difference_map(np.full((1, 1), 99.0), 8))[0, 0] == bright).all()


def test_embedded_images_are_bounded() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8))
    flat = Image.new("RGB", (64, 64), (3, 2, 1))
    for limit in (20_000, 4_000):
        assert len(pictures.webp_uri(noise, limit)) <= limit * 4 / 3 + 60
    assert pictures.webp_uri(flat, 20_000).startswith("data:image/webp;base64,")
    most = 15 * pictures.LARGE_BYTES + pictures.GALLERY_IMAGES * pictures.THUMB_BYTES
    assert most * 4 / 3 < 7.5e6  # of twelve prompts; text and plots are well below the rest to 8 MB


def test_missing_and_broken_images_are_named_and_the_rest_is_shown(tmp_path: Path, results: Results) -> None:
    (tmp_path / "runs/mame-default/images/00001_0.png").unlink()
    (tmp_path / "runs/baseline/images/00002_0.png").write_bytes(b"\x89PNG\r\n")
    whole = (tmp_path / "runs/baseline/images/00003_0.png").read_bytes()
    (tmp_path / "runs/baseline/images/00003_0.png").write_bytes(whole[: len(whole) // 2])
    text = render(results, tmp_path).read_text(encoding="utf-8")
    for name in ("mame-default/images/00001_0.png", "baseline/images/00002_0.png", "baseline/images/00003_0.png"):
        assert f"runs/{name}" in text
    assert text.count('class="shot"') > 10


def test_a_benchmark_that_has_just_begun_has_a_report(tmp_path: Path, results: Results) -> None:
    for entry in results["rows"]:
        entry.update(status="not measured", reason=None, values={}, per_image={}, kept=[])
    results.update(gates=[], reference=None)
    text = render(results, tmp_path).read_text(encoding="utf-8")
    assert "No run with MaMe has been measured yet." in text
    assert "None were run" in text
    assert "Quality (no reference set was given)" in text


def test_failed_gates_come_first(tmp_path: Path, results: Results) -> None:
    results["gates"].append({"name": "unrelated <pairing>", "expected": "far", "got": "near", "passed": False})
    text = render(results, tmp_path).read_text(encoding="utf-8")
    assert "<strong>1 of 2 sanity gates failed:</strong> unrelated &lt;pairing&gt;" in text
    assert text.index("sanity gates failed") < text.index('id="pictures"')
    assert "**1 of 2 sanity gates failed: unrelated &lt;pairing&gt;.**" in (tmp_path / "report.md").read_text()


# --- bad input


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["metrics"], None, "expected metrics (dict), got None"),
        (
            ["metrics", "psnr", "better"],
            "bigger",
            "metrics['psnr'].better: expected one of lower, higher, got 'bigger'",
        ),
        (["metrics", "psnr", "block"], "looks", "expected one of cost, fidelity, quality, got 'looks'"),
        (["rows", 0, "family"], "other", "row 'baseline': family: expected one of baseline, tomesd, mame, got 'other'"),
        (["rows", 0, "status"], "done", "row 'baseline': status: expected one of measured, not measured, got 'done'"),
        (["rows", 0, "run"], "../other", "expected run to be a folder inside, got '../other'"),
        (["rows", 0, "run"], "/other", "expected run to be a folder inside, got '/other'"),
        (["rows", 0, "values", "latency"], 3.0, "row 'baseline': latency: expected mean (int or float), got 3.0"),
        (["rows", 4, "per_image", "lpips"], {"00001_0": "far"}, "lpips: expected one number for each image"),
        (["rows", 4, "kept"], [{"step": 0, "level": 0, "tokens": 4, "kept": 5}], "kept: expected 0 < kept <= tokens"),
        (["rows"], [3], "rows[0]: expected name (str), got 3"),
        (["images", "00001_0"], {}, "images['00001_0']: expected prompt (str), got None"),
        (["gates", 0, "passed"], "yes", "gates[0]: expected passed (bool), got 'yes'"),
    ],
)
def test_bad_results_are_named(tmp_path: Path, results: Results, path: list[Any], value: Any, message: str) -> None:
    target: Any = results
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    with pytest.raises(UserError, match=re.escape(message)):
        render(results, tmp_path)
    assert not (tmp_path / "report.html").exists()


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything inside `value`."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, item in inside for path in ((*here, key), *places(item, (*here, key)))]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return example(tmp_path_factory.mktemp("drawn"))


JUNK = st.sampled_from(
    [None, True, -1, 0, 7, 1.5, -2.5, math.inf, math.nan, "", "lower", "x" * 99, [], [1], {}, {"a": 1}]
)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_junk_anywhere_is_named_or_shown(drawn: Results, data: st.DataObject) -> None:
    results = copy.deepcopy(drawn)
    path = data.draw(st.sampled_from(places(drawn)))
    target: Any = results
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = data.draw(JUNK)
    try:
        parsed = parse(results)
    except UserError:
        return
    chosen = focus(parsed)
    cases(parsed, chosen)
    frontier.points(parsed, chosen)
    assert headline(chosen).endswith(".")
    assert comparison(parsed, chosen) is not None
    assert r"\end{table*}" in latex.render(parsed, chosen)
    assert table_csv(parsed, chosen).count("\n") == 1 + len(parsed.rows)


def test_a_place_that_is_a_file_is_an_error(tmp_path: Path, results: Results) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="choose another"):
        render(results, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_metric_says_which_way_is_better() -> None:
    metric = Metric("psnr", "PSNR", "dB", "higher", "fidelity", 1, "")
    assert metric.arrow == "↑"
