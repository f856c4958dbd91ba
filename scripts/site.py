"""What mkdocs.yml can't say: pages that stand outside of docs/, API pages, anchors as on the
repository's host.

mkdocs calls the functions `on_...` while it builds.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
# Pages of the site by the file of the repository that each is.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "comfyui/README.md": "comfyui.md",
    "mame_sd/embedded/video/README.md": "embedded-video.md",
}
# What users import: a module, and its file in a checkout.
PUBLIC = {
    "mame_sd": "mame_sd/__init__.py",
    "mame_sd.caches": "mame_sd/caches/__init__.py",
    "mame_sd.families": "mame_sd/families.py",
    "mame_sd.pipelines": "pipelines/__init__.py",
}


def on_config(config: Any) -> Any:
    """Take the repository's address from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    place = project["urls"]["Repository"]
    config.repo_url = None if "/OWNER/" in place else place
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand outside of docs/, and the API's."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, "api.md", content="".join(_api())))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to where the site has the file, else to the repository."""
    names = {page: source for source, page in OUTSIDE.items()}
    name = page.file.src_uri
    source = PurePosixPath(names.get(name, f"docs/{name}"))

    def moved(link: re.Match[str]) -> str:
        target = normpath((source.parent / link[2]).as_posix())
        target = OUTSIDE.get(target, target)
        found = target.removeprefix("docs/")
        if found in files.src_uris and (target != found or target in OUTSIDE.values()):
            return f"{link[1]}{relpath(found, PurePosixPath(name).parent.as_posix())}"
        return (
            f"{link[1]}{config.repo_url or 'https://github.com/OWNER/mame-sd'}/blob/HEAD/{target}"
        )

    return re.sub(r"(?m)(\]\(|^\[[^\]]+\]: )(?!https?:|#)([^)#\s]+)", moved, markdown)


def _api() -> Iterator[str]:
    """One heading for each module that users import, and below it what it gives."""
    yield "# API\n\n"
    # mkdocstrings can't follow these from mame_sd, because their files are in pipelines/.
    pipelines = import_module("mame_sd.pipelines").__all__
    for module, file in PUBLIC.items():
        names = import_module(module).__all__
        if module == "mame_sd":
            names = [name for name in names if name not in pipelines]
        place = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        yield f"## {module}\n\n"
        for name in names:
            yield f"::: {place}.{name}\n    options:\n      heading_level: 3\n\n"
