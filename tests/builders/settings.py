"""Settings that tests give by the names of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mame_sd.config import STUDY, Study


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` of MaMeConfig as its keywords: those of `Study` in `study`."""
    study = {name: value for name, value in fields.items() if name in STUDY}
    rest = {name: value for name, value in fields.items() if name not in STUDY}
    return {**rest, "study": Study(**study)} if study else rest
