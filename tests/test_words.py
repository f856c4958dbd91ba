"""What the project says of the paper and of itself: one title and one list of authors everywhere.

Lines of pages fit.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

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


def test_issue_templates_ask_for_doctor() -> None:
    templates = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert templates
    for path in templates:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(form)
        fields = {field["id"]: field for field in form["body"]}
        assert "mame-sd doctor" in fields["doctor"]["attributes"]["label"]
        assert fields["doctor"]["validations"]["required"]


def test_lines_of_pages_fit() -> None:
    for page in PAGES:
        text = re.sub(r"^```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        text = INDENTED.sub("", text)
        prose = re.sub(r"^(?:\||#|<!--|!\[).*$", "", text, flags=re.M)
        tables = re.sub(r"^[^|].*$", "", text, flags=re.M)
        for line in (prose + tables).splitlines():
            assert len(line) <= LONGEST_LINE or "](http" in line, f"{page.name}: {line}"


def test_pages_of_the_log_ask_answer_and_give_a_command() -> None:
    listed = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    for page in LOG:
        text = page.read_text(encoding="utf-8")
        assert re.match(r"# .*\n\n\*\*Question\.\*\* .*\?", text, re.S), page.name
        assert "\n\n**Verdict.** " in text, page.name
        assert re.search(r"python\s-m\s|pytest |mame-sd", text), f"{page.name}: what prints it?"
        assert f"](log/{page.name})" in listed, page.name
