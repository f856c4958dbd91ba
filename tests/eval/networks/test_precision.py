"""Networks run in whole precision whatever the user allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mame_sd.eval.networks import full_precision


def precisions() -> list[Any]:
    """What the user has allowed, by the new settings and, where it does not contradict these, by
    the old one.
    """
    backends = torch.backends
    places = (
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
    )
    try:
        old = torch.get_float32_matmul_precision()
    except RuntimeError:
        old = "contradicts"
    return [
        *(place.fp32_precision for place in places),
        backends.cudnn.deterministic,
        backends.cudnn.benchmark,
        old,
    ]


USERS_CHOICES: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "everything": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
}


@pytest.fixture
def own_precisions() -> Iterator[None]:
    """What the test allows is taken back."""
    places = (torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    before = [place.fp32_precision for place in places]
    yield
    torch.backends.fp32_precision = "none"
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")
    for place, value in zip(places, before, strict=True):
        place.fp32_precision = value


@pytest.mark.usefixtures("own_precisions")
@pytest.mark.parametrize("choice", USERS_CHOICES)
def test_networks_run_in_whole_precision_whatever_the_user_allows(choice: str) -> None:
    backends = torch.backends
    USERS_CHOICES[choice]()
    before = precisions()
    with full_precision():
        places = (
            backends.cuda.matmul,
            backends.cudnn.conv,
            backends.mkldnn.matmul,
            backends.mkldnn.conv,
        )
        assert [place.fp32_precision for place in places] == ["ieee"] * 4
        assert (backends.cudnn.deterministic, backends.cudnn.benchmark) == (True, False)
        assert not torch.is_grad_enabled()
        assert torch.isfinite(
            torch.nn.functional.conv2d(torch.ones(1, 3, 8, 8), torch.ones(2, 3, 3, 3))
            @ torch.ones(6, 2)
        ).all()
    assert precisions() == before
