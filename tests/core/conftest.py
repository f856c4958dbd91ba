from __future__ import annotations

import pytest

from mame_sd.core import groups


@pytest.fixture(params=["means by index", "means by products"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test as CPUs average groups, and as cards do."""
    if request.param == "means by products":
        monkeypatch.setattr(groups, "ADDING", ())
