"""The page: nothing in it is fetched or executed, everything has words, colours and ids hold."""

from __future__ import annotations

import re
from pathlib import Path

from mame_sd.eval.report import render
from mame_sd.eval.results.read import parse
from tests.builders.report_example import example
from tests.builders.report_page import Elements, Results

CSS = (Path(__file__).parents[3] / "eval" / "report" / "templates" / "report.css").read_text(
    encoding="utf-8"
)


def test_nothing_is_fetched_ids_are_unique_and_everything_has_words(page: str) -> None:
    elements = Elements(page)
    given = [(name, value) for _, attrs in elements.tags for name, value in attrs.items() if value]
    addresses = [value for name, value in given if name in ("src", "href")]
    assert [a for a in addresses if not a.startswith(("data:", "#"))] == []
    assert "url(" not in CSS
    assert "@import" not in CSS
    policy = next(
        a["content"] or ""
        for a in elements.all("meta")
        if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; img-src data:;")
    ids = [value for name, value in given if name == "id"]
    assert len(ids) == len(set(ids))
    shots = [attrs for attrs in elements.all("button") if attrs.get("class") == "shot"]
    # three cases with two maps each, and the gallery of four prompts and four rows
    assert len(shots) == 3 * 5 + 4 * 4
    assert all((attrs["aria-label"] or "").startswith("Enlarge: ") for attrs in shots)
    # the last is the dialog's, filled by the script
    assert all(image["alt"] for image in elements.all("img")[:-1])
    plots = [attrs["aria-label"] or "" for attrs in elements.all("svg")]
    assert len(plots) == 2  # for wide and narrow screens
    assert "MaMe (default) 1.60 times as fast" in plots[0]
    assert "closest to the baseline, in the middle, and furthest from it, by LPIPS" in page


ATTACKS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</p></style><style>*{background:url(//x.test)}</style>",
    "{{ 7 * 7 }}{% for x in y %}{# #}",
    "\u202edrowssap\u2066 \u200f",
    "a\u2028b\0\x1b[31m\x85",
    "<meta http-equiv=refresh content='0;url=//x.test'>",
    "$\\input{/etc/passwd}$ \\write18{id} | a | b | `c` [d](//x.test) ![e](//x.test)",
)


def shape(folder: Path, words: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    """Tags and names of attributes of a report in which `words` are all that others may write."""
    every = " ".join(words)
    results = example(folder, side=4, prompts=words)
    results["notes"] = list(words)
    results["suite"] = results["reference"] = results["manifest"]["model"]["name"] = every
    results["manifest"]["command"] = f"mame-sd-eval benchmark --prompts '{every}'"
    results["gates"] += [
        {"name": word, "expected": word, "got": word, "passed": False} for word in words
    ]
    for row in results["rows"]:
        row["reason"] = every
    page = render(parse(results), folder).read_text(encoding="utf-8")
    return [(tag, sorted(attributes)) for tag, attributes in Elements(page).tags]


def test_no_text_makes_elements(tmp_path: Path) -> None:
    harmless = ("a harmless word",) * len(ATTACKS)
    (tmp_path / "harmless").mkdir()
    (tmp_path / "attacks").mkdir()
    assert shape(tmp_path / "attacks", ATTACKS) == shape(tmp_path / "harmless", harmless)


def test_plots_take_the_colors_of_the_page(page: str) -> None:
    svgs = "".join(re.findall(r"<svg.*?</svg>", page, re.S))
    assert re.findall(r"#[0-9a-f]{6}\b", svgs) == []
    assert "font-family" not in svgs
    used = set(re.findall(r"var\(--([a-z]+)\)", svgs))
    schemes = CSS.split("@media (prefers-color-scheme: dark)")
    for scheme in schemes[:2]:
        assert used <= set(re.findall(r"--([a-z]+):", scheme))


def test_the_same_results_give_the_same_bytes(
    written: Path, tmp_path: Path, results: Results
) -> None:
    names = ("report.html", "report.md", "table.csv")
    assert render(parse(results), tmp_path) == tmp_path / "report.html"
    for name in names:
        assert (tmp_path / name).read_bytes() == (written / name).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {*names, "runs"}


def test_failed_gates_come_first_and_a_benchmark_that_has_just_begun_has_a_report(
    tmp_path: Path, unplotted: Results
) -> None:
    results, name = unplotted, "unrelated <pairing>"
    results["gates"].append({"name": name, "expected": "far", "got": "near", "passed": False})
    text = render(parse(results), tmp_path).read_text(encoding="utf-8")
    assert "<strong>1 of 2 sanity gates failed:</strong> unrelated &lt;pairing&gt;" in text
    assert text.index("sanity gates failed") < text.index('id="pictures"')
    said = "**1 of 2 sanity gates failed: unrelated &lt;pairing&gt;.**"
    assert said in (tmp_path / "report.md").read_text()
    for entry in results["rows"]:
        entry.update(measured=False, reason=None, values={}, per_image={})
    results.update(gates=[], reference=None)
    text = render(parse(results), tmp_path).read_text(encoding="utf-8")
    assert "No run with MaMe has been measured yet." in text
    assert "None were run" in text
    assert "Quality (no reference set was given)" in text
