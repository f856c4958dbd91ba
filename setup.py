"""Give the wheel README.md as its description, with links that lead somewhere from anywhere.

In the repository its links are relative. A package index shows the text alone, so there they lead
to the release's tag at `[project.urls] Repository`. All other metadata stands in pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def description() -> str:
    """README.md, its pictures and pages by their addresses at the release's tag."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for start, kind in ((r"!\[", "raw"), (r"(?<!!)\[", "blob")):
        place = f"{PROJECT['urls']['Repository']}/{kind}/v{PROJECT['version']}/"
        text = re.sub(rf"({start}[^\]]*\]\()(?!https?:|#)", rf"\g<1>{place}", text)
    return text


setup(long_description=description(), long_description_content_type="text/markdown")
