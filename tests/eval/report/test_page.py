"""The page: nothing in it is fetched or executed, everything has words, colours and ids hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markupsafe import escape

from mame_sd.eval.report import render
from mame_sd.eval.results.read import parse
from tests.builders.report_example import PROMPTS, example
from tests.builders.report_page import Elements, Results

CSS = (Path(__file__).parents[3] / "eval" / "report" / "templates" / "report.css").read_text(
    encoding="utf-8"
)


def test_nothing_is_fetched(page: str) -> None:
    elements = Elements(page)
    addresses = [
        value
        for _, attrs in elements.tags
        for name, value in attrs.items()
        if name in ("src", "href") and value
    ]
    outside = [a for a in addresses if not a.startswith(("data:", "#"))]
    assert outside == []
    assert "url(" not in CSS
    assert "@import" not in CSS
    policy = next(
        a["content"]
        for a in elements.all("meta")
        if a.get("http-equiv") == "Content-Security-Policy"
    )
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


ATTACKS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)' x='",
    "</p></style><style>*{background:url(//x.test)}</style>",
    "</script><script>fetch('//x.test')</script>",
    "{{ 7 * 7 }}{% for x in y %}{# #}",
    "\u202edrowssap\u2066 \u200f",
    "<!-- ]]> -->",
    "javascript:alert(1)",
    "&lt;script&gt;&#60;b&#62;",
    "<svg/onload=alert(1)>",
    "a\u2028b\0\x1b[31m\x85",
    "<base href=//x.test>",
    "<meta http-equiv=refresh content='0;url=//x.test'>",
    "\udcff\ud83d",
    "$\\input{/etc/passwd}$ \\write18{id} | a | b | `c` [d](//x.test) ![e](//x.test)",
)


AT_ONCE = 8  # attacks in one page, each in a prompt too


def shape(folder: Path, words: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    """Tags and names of attributes of a report in which `words` are all that others may write."""
    assert len(words) == AT_ONCE
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


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list[str]]]:
    return shape(tmp_path_factory.mktemp("harmless"), ("a harmless word",) * AT_ONCE)


@pytest.mark.parametrize("first", range(0, len(ATTACKS), AT_ONCE))
def test_no_text_makes_elements(
    tmp_path: Path, harmless: list[tuple[str, list[str]]], first: int
) -> None:
    attacks = (ATTACKS + ATTACKS)[first : first + AT_ONCE]
    assert shape(tmp_path, attacks) == harmless


def test_the_direction_of_a_prompt_ends_with_it(page: str) -> None:
    assert len(Elements(page).all("bdi")) == 3 + 4  # the chosen prompts, then all of them


def test_every_picture_and_plot_has_words(page: str) -> None:
    elements = Elements(page)
    shots = [attrs for attrs in elements.all("button") if attrs.get("class") == "shot"]
    assert (
        len(shots) == 3 * 5 + 4 * 4
    )  # three cases with two maps each, and the gallery of four prompts and four rows
    assert all((attrs["aria-label"] or "").startswith("Enlarge: ") for attrs in shots)
    assert all(
        image["alt"] for image in elements.all("img")[:-1]
    )  # the last is the dialog's, filled by the script
    plots = [attrs["aria-label"] or "" for attrs in elements.all("svg")]
    assert len(plots) == 2  # for wide and narrow screens
    assert "MaMe (default) 1.60 times as fast" in plots[0]


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


def test_the_same_results_give_the_same_bytes(
    written: Path, tmp_path: Path, results: Results
) -> None:
    names = ("report.html", "report.md", "table.csv")
    assert render(parse(results), tmp_path) == tmp_path / "report.html"
    for name in names:
        assert (tmp_path / name).read_bytes() == (written / name).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {*names, "runs"}


def test_a_benchmark_that_has_just_begun_has_a_report(tmp_path: Path, results: Results) -> None:
    for entry in results["rows"]:
        entry.update(measured=False, reason=None, values={}, per_image={})
    results.update(gates=[], reference=None)
    text = render(parse(results), tmp_path).read_text(encoding="utf-8")
    assert "No run with MaMe has been measured yet." in text
    assert "None were run" in text
    assert "Quality (no reference set was given)" in text


def test_failed_gates_come_first(tmp_path: Path, unplotted: Results) -> None:
    results = unplotted
    results["gates"].append(
        {"name": "unrelated <pairing>", "expected": "far", "got": "near", "passed": False}
    )
    text = render(parse(results), tmp_path).read_text(encoding="utf-8")
    assert "<strong>1 of 2 sanity gates failed:</strong> unrelated &lt;pairing&gt;" in text
    assert text.index("sanity gates failed") < text.index('id="pictures"')
    assert (
        "**1 of 2 sanity gates failed: unrelated &lt;pairing&gt;.**"
        in (tmp_path / "report.md").read_text()
    )
