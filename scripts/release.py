"""Set the version everywhere, and say what is missing for a release.

python -m scripts.release version 0.3.0
python -m scripts.release check --tag v0.3.0 --repository https://github.com/NAME/mame-sd
python -m scripts.release check --comfy
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Where the version stands. pyproject.toml's first line of them decides, the others follow.
PLACES = (
    ("pyproject.toml", r'(?m)^version = "(.*)"$'),
    ("pyproject.toml", r'"mame-sd-models==(.*?)"'),
    ("mame_sd/embedded/pyproject.toml", r'(?m)^version = "(.*)"$'),
    ("CITATION.cff", r"(?m)^version: (.*)$"),
)


def set_version(version: str, root: Path = ROOT) -> None:
    """Write `version` at each of its places.

    Raises:
        ValueError: it is not of the form 1.2.3, which Comfy's registry asks for.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"expected a version like 0.3.0, got {version}")
    for name, pattern in PLACES:
        path = root / name
        text = path.read_text(encoding="utf-8")
        start, end = _match(pattern, text, name).span(1)
        path.write_text(text[:start] + version + text[end:], encoding="utf-8", newline="\n")


def problems(
    root: Path = ROOT,
    tag: str | None = None,
    repository: str | None = None,
    comfy: bool = False,
) -> Iterator[str]:
    """What stands in the way of a release, one line each.

    Args:
        root: the checkout.
        tag: the tag that is released; None asks for no tag.
        repository: the address it is released from; None takes any.
        comfy: ask for what Comfy's registry needs too.
    """
    texts = {name: (root / name).read_text(encoding="utf-8") for name, _ in PLACES}
    versions = [_match(pattern, texts[name], name)[1] for name, pattern in PLACES]
    version = versions[0]
    for (name, _), found in zip(PLACES, versions, strict=True):
        if found != version:
            yield (
                f"{name}: expected version {version}, got {found};"
                f" run python -m scripts.release version {version}"
            )
    if tag is not None and tag != f"v{version}":
        yield f"expected the tag v{version}, got {tag}; tag anew or set the version"
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"(?m)^## {re.escape(version)}$", changes):
        yield f"CHANGELOG.md: expected the heading '## {version}' and nothing behind it"
    project = tomllib.loads(texts["pyproject.toml"])
    place = project["project"]["urls"]["Repository"]
    if "/OWNER/" in place or not place.startswith("https://"):
        yield f"pyproject.toml: expected the repository's address, got {place}; set Repository"
    elif repository is not None and place != repository:
        yield f"pyproject.toml: expected Repository {repository}, from where it runs; got {place}"
    publisher = project["tool"]["comfy"]["PublisherId"]
    if comfy and publisher in ("", "PUBLISHER"):
        yield f"pyproject.toml: expected a publisher of Comfy's registry, got {publisher!r}"


def _match(pattern: str, text: str, name: str) -> re.Match[str]:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"{name}: expected a version like {pattern}, found none")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    setter = commands.add_parser("version", help="write a version at each of its places")
    setter.add_argument("version")
    checker = commands.add_parser("check", help="say what is missing; exit code 1 if anything is")
    checker.add_argument("--tag", help="the tag that is released")
    checker.add_argument("--repository", help="the address it is released from")
    checker.add_argument("--comfy", action="store_true", help="for Comfy's registry too")
    given = parser.parse_args()
    if given.command == "version":
        set_version(given.version)
        return 0
    found = [*problems(ROOT, given.tag, given.repository, given.comfy)]
    print("\n".join(found) or "nothing is missing", file=sys.stderr if found else sys.stdout)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
