"""Every tiny model of a class of diffusers, by its class."""

from __future__ import annotations

from typing import Any

from tests.matrix.models import images, others, videos
from tests.matrix.models.case import Case

CASES = [*others.CASES, *images.CASES, *videos.CASES]
MODELS: dict[str, Case] = {case.name: case for case in CASES}


def tiny_model(name: str) -> tuple[Any, dict[str, Any]]:
    """Return the tiny model of a class of diffusers, and the arguments of a call."""
    return MODELS[name].build(), MODELS[name].inputs()
