"""The manifest as a reader sees it: flat names, and the few settings that belong beside the
headline.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..results.schema import Results

_FACTS = (  # manifest key, how it reads beside the headline
    ("steps", "{} steps"),
    ("guidance", "guidance {}"),
    ("device", "{}"),
    ("dtype", "{}"),
    ("threads", "CPU threads: {}"),
)


def flat(manifest: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(dotted name, value) of every leaf, in the manifest's order."""
    found = []
    for key, value in manifest.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found += flat(value, f"{name}.")
        else:
            found.append(
                (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            )
    return found


def lookup(manifest: Mapping[str, Any], key: str) -> Any:
    """The first value named `key` at any depth, outermost first; None where there is none."""
    if key in manifest and not isinstance(manifest[key], Mapping):
        return manifest[key]
    inner = (lookup(value, key) for value in manifest.values() if isinstance(value, Mapping))
    return next((value for value in inner if value is not None), None)


def facts(results: Results) -> list[str]:
    """What the figures stand on, in a few words each."""
    found = [f"{results.images:,} image{'s' * (results.images != 1)} per row"]
    for key, words in _FACTS:
        value = lookup(results.manifest, key)
        if value is not None:
            found.append(words.format(value))
    return found
