"""What tests of diffusion share."""

from __future__ import annotations

from typing import Any

import pytest

from mame_sd.core.plan import Plan
from mame_sd.diffusion import layer


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """All plans that are made, in order."""
    made: list[Plan] = []

    def plan(*args: Any, **kwargs: Any) -> Plan:
        made.append(plan_merge(*args, **kwargs))
        return made[-1]

    plan_merge = layer.plan_merge
    monkeypatch.setattr(layer, "plan_merge", plan)
    return made
