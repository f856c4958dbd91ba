"""Every tiny model of a class of diffusers, by its class."""

from __future__ import annotations

from tests.matrix.models import images, others, videos
from tests.matrix.models.case import Case

CASES = [*others.CASES, *images.CASES, *videos.CASES]
MODELS: dict[str, Case] = {case.name: case for case in CASES}
