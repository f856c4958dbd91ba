"""What the project says of the paper and of itself: one title and one list of authors everywhere.

Links lead somewhere. Sentences have 25 words at most, and lines fit.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
METHOD = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "prompts").glob("*.md")]
    + [page for room in ("comfyui", "docs") for page in (ROOT / room).rglob("*.md")]
)
LOG = sorted((ROOT / "docs" / "log").glob("*.md"))
SOURCES = sorted(
    path
    for room in (
        ".",
        "benchmarks",
        "comfyui",
        "eval",
        "examples",
        "mame_sd",
        "pipelines",
        "prompts",
        "scripts",
        "tests",
    )
    for path in (ROOT.glob("*.py") if room == "." else (ROOT / room).rglob("*.py"))
)
LONGEST_SENTENCE = 25  # words; a span of code is one
LONGEST_LINE = 120  # characters of a page, outside commands and addresses
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?: {4}.*\n+)+", re.M)


def test_readme_method_and_citation_name_the_same_paper() -> None:
    (paper,) = CITATION["references"]
    bibtex = re.search(r"```bibtex\n(.*?)```", METHOD, re.S)
    assert bibtex is not None
    entry = dict(re.findall(r"(\w+)\s*= \{(.*)\}", bibtex[1]))
    assert re.sub(r"[{}\\]", "", entry["title"]) == paper["title"]
    assert entry["author"] == " and ".join(
        f"{one['family-names']}, {one['given-names']}" for one in paper["authors"]
    )
    assert entry["year"] == str(paper["year"])
    assert entry["journal"].endswith(paper["identifiers"][0]["value"])
    assert paper["url"] in README
    assert paper["repository-code"] in README
    assert "An independent implementation" in README


def test_citation_has_the_packages_version_and_license() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (CITATION["title"], CITATION["version"], CITATION["license"]) == (
        project["name"],
        project["version"],
        project["license"],
    )
    assert CITATION["cff-version"] == "1.2.0"
    assert CITATION["authors"]


def test_links_of_contributing_lead_somewhere() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!http)([^)#]+)", page):
        assert (ROOT / target).exists(), target


def test_issue_templates_ask_for_doctor() -> None:
    templates = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert templates
    for path in templates:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(form)
        fields = {field["id"]: field for field in form["body"]}
        assert "mame-sd doctor" in fields["doctor"]["attributes"]["label"]
        assert fields["doctor"]["validations"]["required"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_have_short_sentences_and_lines(page: Path) -> None:
    text = re.sub(r"^```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    text = INDENTED.sub("", text)
    prose = re.sub(r"^(?:\||#|<!--|!\[).*$", "", text, flags=re.M)
    tables = re.sub(r"^[^|].*$", "", text, flags=re.M)
    for line in (prose + tables).splitlines():
        assert len(line) <= LONGEST_LINE or "](http" in line, line
    assert [*too_long(re.sub(r"\]\([^)]*\)", "]", prose))] == []
    assert "in place of" not in text.lower()


@pytest.mark.parametrize("page", LOG, ids=lambda page: page.stem)
def test_pages_of_the_log_ask_answer_and_give_a_command(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.match(r"# .*\n\n\*\*Question\.\*\* .*\?", text, re.S)
    assert "\n\n**Verdict.** " in text
    assert re.search(r"python\s-m\s|pytest |mame-sd", text), "a figure needs what prints it"
    assert f"](log/{page.name})" in (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")


def test_docstrings_and_comments_have_short_sentences() -> None:
    long = [
        f"{file.relative_to(ROOT)}: {sentence}"
        for file in SOURCES
        for text in (*docstrings(file), *comments(file))
        for sentence in too_long(text)
    ]
    assert long == []


def test_nothing_is_in_place_of_another() -> None:
    """The phrase was everywhere once; `instead of`, or nothing, says it plainly."""
    for file in SOURCES:
        if file != Path(__file__):
            words = re.sub(r"[\s\"#]+", " ", file.read_text(encoding="utf-8")).lower()
            assert "in place of" not in words, file


def test_the_splitter_finds_a_long_sentence() -> None:
    words = "Every layer of a model merges its tokens " * 4
    assert [*too_long(f"Short. {words.strip()}. Also short.")] == [f"{words.strip()}."]
    assert [*too_long(f"`{words}` is one word, so is this.")] == []


def too_long(text: str) -> Iterator[str]:
    """The sentences of `text` that have more words than anybody wants to read."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. ))", text):
        plain = re.sub(r"`+[^`]*`+", "X", " ".join(block.split()))
        for sentence in re.split(r"(?<=[.!?])[\"')\]*]*\s+(?=[\"'(\[*A-Z0-9])", plain):
            if len(re.findall(r"\w[^\s]*", sentence)) > LONGEST_SENTENCE:
                yield sentence


def docstrings(file: Path) -> Iterator[str]:
    """Those of a file, without lists of arguments, examples and drawings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text:
            text = re.split(r"^(?:Args|Attributes|Raises|Returns|Yields):", text, flags=re.M)[0]
            yield re.sub(r"^(?: {4}|\||>>> |\.\.\. ).*$", "", text, flags=re.M)


def comments(file: Path) -> Iterator[str]:
    """Those on lines of their own, neighbouring lines as one."""
    for lines in re.findall(r"(?:^ *#.*\n)+", file.read_text(encoding="utf-8"), re.M):
        yield re.sub(r"^ *#:? ?", "", lines, flags=re.M)
