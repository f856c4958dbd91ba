"""Define fixtures for tests of diffusion models."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch._dynamo

from mame_sd.core import merge_keys
from mame_sd.core.groups import Groups


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Groups]:
    """Return a list that all groups are added to when they are formed."""
    made: list[Groups] = []

    def group(*args: Any, **kwargs: Any) -> Groups:
        made.append(group_tokens(*args, **kwargs))
        return made[-1]

    group_tokens = merge_keys.group_tokens
    monkeypatch.setattr(merge_keys, "group_tokens", group)
    return made


@pytest.fixture
def graphs() -> Counter[str]:
    """Return Dynamo's counters, such as "unique_graphs", before anything is compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters["stats"]
