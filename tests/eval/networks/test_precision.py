"""Networks run in whole precision whatever the user allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def precisions() -> list[Any]:
    """What the user has allowed, by the new settings and, where it does not contradict these, by
    the old one.
    """
    try:
        old = torch.get_float32_matmul_precision()
    except RuntimeError:
        old = "contradicts"
    found = [place.fp32_precision for place in (*PLACES, BACKENDS.cudnn.rnn)]
    return [*found, BACKENDS.cudnn.deterministic, BACKENDS.cudnn.benchmark, old]


USERS_CHOICES: dict[str, Callable[[], None]] = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "everything": lambda: setattr(BACKENDS, "fp32_precision", "tf32"),
    "benchmark": lambda: setattr(BACKENDS.cudnn, "benchmark", True),
}


@pytest.fixture
def own_precisions() -> Iterator[None]:
    """What the test allows is taken back."""
    places = (BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn)
    before = [place.fp32_precision for place in places]
    yield
    BACKENDS.fp32_precision = "none"
    BACKENDS.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")
    for place, value in zip(places, before, strict=True):
        place.fp32_precision = value


@pytest.mark.usefixtures("own_precisions")
@pytest.mark.parametrize("choice", USERS_CHOICES)
def test_networks_run_in_whole_precision_whatever_the_user_allows(choice: str) -> None:
    USERS_CHOICES[choice]()
    before = precisions()
    with full_precision():
        assert [place.fp32_precision for place in PLACES] == ["ieee"] * 4
        assert (BACKENDS.cudnn.deterministic, BACKENDS.cudnn.benchmark) == (True, False)
        assert not torch.is_grad_enabled()
    assert precisions() == before
