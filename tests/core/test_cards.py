"""How long a card takes: the longest of three times, by what the products are made of."""

from __future__ import annotations

import pytest
import torch

from mame_sd.core.cards import LAUNCH, MEMORY, SINGLE, SMALLEST, THIRDS, Card, Work

CARD = Card("test", bandwidth=1e12, half=100e12, tf32=30e12, single=20e12, products=0.5, attention=0.4)
HALF, FULL = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work("add", "other", FULL, 100, 0), SMALLEST),
        (Work("sort", "other", FULL, 100, 0, launches=6), 6 * SMALLEST),
        (Work("add", "other", FULL, 8e9, 0), 8e9 / (MEMORY * 1e12)),
        (Work("mm", "product", HALF, 100, 1e12), 1e12 / 50e12),
        (Work("mm", "product", FULL, 100, 1e12), 1e12 / (SINGLE * 20e12)),
        (Work("conv", "convolution", FULL, 100, 1e12), 1e12 / (SINGLE * 30e12)),
        (Work("attention", "attention", HALF, 100, 1e12, width=64), 1e12 / 40e12),
        (Work("attention", "attention", HALF, 100, 1e12, width=40), 1e12 / (40e12 * 40 / 64)),
        (Work("attention", "attention", FULL, 100, 1e12, width=64), 1e12 / (THIRDS * 10e12)),
    ],
)
def test_an_operation_takes_the_longest_of_three_times(work: Work, seconds: float) -> None:
    assert CARD.seconds(work) == pytest.approx(seconds)


def test_a_mask_makes_attention_slower() -> None:
    plain = Work("attention", "attention", HALF, 100, 1e12, width=64)
    assert CARD.seconds(plain._replace(kind="masked attention")) > CARD.seconds(plain)


def test_launching_hides_behind_work_and_shows_where_there_is_little() -> None:
    small, large = Work("add", "other", FULL, 100, 0), Work("mm", "product", HALF, 100, 1e12)
    assert CARD.busy([large, small]) == pytest.approx(CARD.seconds(large) + SMALLEST)
    assert CARD.eager([large, small]) == pytest.approx(LAUNCH + CARD.seconds(large) + SMALLEST)
    assert CARD.eager([small] * 100) == pytest.approx(100 * LAUNCH + SMALLEST)
