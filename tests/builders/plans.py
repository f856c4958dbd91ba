"""Which plans merged in a model's layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from mame_sd.report import LayerStats


@contextmanager
def latest_plans() -> Iterator[dict[str, Any]]:
    """By name of a layer the plan of its latest call in the block that merged."""
    plans: dict[str, Any] = {}
    count = LayerStats.merged

    def merged(self: LayerStats, found: Any, size: tuple[int, ...], note: str = "") -> None:
        plans[self.name] = found[0]
        count(self, found, size, note)

    with mock.patch.object(LayerStats, "merged", merged):
        yield plans
