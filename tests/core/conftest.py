from __future__ import annotations

import pytest

from mame_sd.core import groups


@pytest.fixture(params=["means by index", "means by products"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test twice: with means by index, as on CPUs, and by products, as on GPUs."""
    if request.param == "means by products":
        monkeypatch.setattr(groups, "ADDING", ())
