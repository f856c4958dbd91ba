"""Set what a release needs everywhere it stands, and say what is missing.

python -m scripts.release owner NAME
python -m scripts.release version 0.3.0
python -m scripts.release check --tag v0.3.0 --repository https://github.com/NAME/mame-sd
python -m scripts.release links  # before a wheel is built for a package index
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
VERSIONS = (
    ("pyproject.toml", r'(?m)^version = "(.*)"$'),
    ("pyproject.toml", r'"mame-sd-models==(.*?)"'),
    ("mame_sd/embedded/pyproject.toml", r'(?m)^version = "(.*)"$'),
    ("CITATION.cff", r"(?m)^version: (.*)$"),
)
UNSET = "OWNER"  # stands for the owner until it is set
# Where the owner stands: the account that publishes the repository, and Comfy's publisher.
OWNERS = (
    ("pyproject.toml", r'(?m)^Repository = "https://github\.com/(.*)/mame-sd"$'),
    ("pyproject.toml", r'(?m)^PublisherId = "(.*)"$'),
    ("comfyui/README.md", r"git clone https://github\.com/(.*)/mame-sd"),
)


def set_version(version: str, root: Path = ROOT) -> None:
    """Write `version` at each of its places.

    Raises:
        ValueError: If it doesn't have the form 1.2.3, which Comfy's registry requires.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"expected a version like 0.3.0, got {version}")
    _write(VERSIONS, version, root)


def set_owner(owner: str, root: Path = ROOT) -> None:
    """Write `owner`, the name of an account, at each of its places.

    Raises:
        ValueError: If it isn't the name of an account.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]*", owner) or owner == UNSET:
        raise ValueError(f"expected the name of an account such as somebody, got {owner}")
    _write(OWNERS, owner, root)


def set_links(root: Path = ROOT) -> None:
    """Make the relative links of README.md absolute, so that they work on a package index.

    They lead to the release's tag in the repository.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    path = root / "README.md"
    text = path.read_text(encoding="utf-8")
    for start, kind in ((r"!\[", "raw"), (r"(?<!!)\[", "blob")):
        place = f"{project['urls']['Repository']}/{kind}/v{project['version']}/"
        text = re.sub(rf"({start}[^\]]*\]\()(?!https?:|#)", rf"\g<1>{place}", text)
    path.write_text(text, encoding="utf-8", newline="\n")


def problems(
    root: Path = ROOT, tag: str | None = None, repository: str | None = None
) -> Iterator[str]:
    """Yield what is missing for a release, one line each.

    Args:
        root: The checkout.
        tag: The released tag. If None, no tag is checked.
        repository: The address that is released from. If None, any.
    """
    versions = _read(VERSIONS, root)
    version = versions[0][1]
    for name, value in versions:
        if value != version:
            yield (
                f"{name}: expected version {version}, got {value};"
                f" run python -m scripts.release version {version}"
            )
    if tag is not None and tag != f"v{version}":
        yield f"expected the tag v{version}, got {tag}; tag again or set the version"
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"(?m)^## {re.escape(version)}$", changes):
        yield f"CHANGELOG.md: expected the heading '## {version}' and nothing behind it"
    unset = [name for name, value in _read(OWNERS, root) if value == UNSET]
    if unset:
        yield (
            f"{', '.join(dict.fromkeys(unset))}: expected the owner of the repository, got"
            f" {UNSET}; run python -m scripts.release owner NAME"
        )
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    place = project["urls"]["Repository"]
    if not unset and repository not in (None, place):
        yield f"pyproject.toml: expected Repository {repository}, from where it runs; got {place}"


def _read(places: tuple[tuple[str, str], ...], root: Path) -> list[tuple[str, str]]:
    """Return the file and the value of each place."""
    return [
        (name, _match(pattern, (root / name).read_text(encoding="utf-8"), name)[1])
        for name, pattern in places
    ]


def _write(places: tuple[tuple[str, str], ...], value: str, root: Path) -> None:
    """Write a value at each place."""
    for name, pattern in places:
        path = root / name
        text = path.read_text(encoding="utf-8")
        start, end = _match(pattern, text, name).span(1)
        path.write_text(text[:start] + value + text[end:], encoding="utf-8", newline="\n")


def _match(pattern: str, text: str, name: str) -> re.Match[str]:
    """Return the match of a place's pattern."""
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"{name}: expected a line like {pattern}, found none")
    return match


def main() -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("owner", "version"):
        setter = commands.add_parser(command, help=f"write the {command} at each of its places")
        setter.add_argument("value")
    commands.add_parser("links", help="make the links of README.md absolute")
    checker = commands.add_parser("check", help="say what is missing; exit status 1 if anything is")
    checker.add_argument("--tag", help="the tag that is released")
    checker.add_argument("--repository", help="the address it is released from")
    options = parser.parse_args()
    try:
        if options.command == "owner":
            set_owner(options.value)
        elif options.command == "version":
            set_version(options.value)
        elif options.command == "links":
            set_links()
        else:
            missing = [*problems(ROOT, options.tag, options.repository)]
            print(
                "\n".join(missing) or "nothing is missing",
                file=[sys.stdout, sys.stderr][bool(missing)],
            )
            return int(bool(missing))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
