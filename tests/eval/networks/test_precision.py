"""Networks run in whole precision whatever the user allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mame_sd.eval.networks import full_precision

BACKENDS = torch.backends
PLACES = (
    BACKENDS.cuda.matmul,
    BACKENDS.cudnn.conv,
    BACKENDS.mkldnn.matmul,
    BACKENDS.mkldnn.conv,
)


def allowed() -> list[Any]:
    """What the user has allowed."""
    found = [place.fp32_precision for place in (*PLACES, BACKENDS.cudnn.rnn)]
    return [*found, BACKENDS.cudnn.deterministic, BACKENDS.cudnn.benchmark]


USERS_CHOICES: dict[str, Callable[[], None]] = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "everything": lambda: setattr(BACKENDS, "fp32_precision", "tf32"),
    "benchmark": lambda: setattr(BACKENDS.cudnn, "benchmark", True),
}


@pytest.mark.parametrize("choice", USERS_CHOICES)
def test_networks_run_in_whole_precision_whatever_the_user_allows(choice: str) -> None:
    places = (BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn)
    at_first = [place.fp32_precision for place in places]
    try:
        USERS_CHOICES[choice]()
        before = allowed()
        with full_precision():
            assert [place.fp32_precision for place in PLACES] == ["ieee"] * 4
            assert (BACKENDS.cudnn.deterministic, BACKENDS.cudnn.benchmark) == (True, False)
            assert not torch.is_grad_enabled()
        assert allowed() == before
    finally:
        BACKENDS.fp32_precision = "none"
        BACKENDS.cudnn.benchmark = False
        torch.set_float32_matmul_precision("highest")
        for place, value in zip(places, at_first, strict=True):
            place.fp32_precision = value
