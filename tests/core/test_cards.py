"""How long a card takes: the longest of three times, by what the products are made of."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mame_sd.core import cards
from mame_sd.core.cards import CARDS, LAUNCH, MEMORY, SINGLE, SMALLEST, THIRDS, Card, Work

CARD = Card(
    "test", bandwidth=1e12, half=100e12, tf32=30e12, single=20e12, products=0.5, attention=0.4
)
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


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA GeForce RTX 3090", "GeForce RTX 3090"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H100 PCIe", None),
        ("Tesla T4", None),
    ],
)
def test_cards_are_told_by_name(name: str, known: str | None) -> None:
    assert cards._named(name) == (None if known is None else CARDS[known])


def test_other_cards_are_told_by_their_processors_clocks_and_memory() -> None:
    seen = SimpleNamespace(
        name="NVIDIA GeForce RTX 3090 Ti",
        major=8,
        minor=6,
        multi_processor_count=84,
        clock_rate=1_860_000,
        memory_clock_rate=10_501_000,
        memory_bus_width=384,
    )
    card = cards._by_properties(seen)
    assert card is not None
    assert (card.bandwidth, card.half, card.tf32, card.single) == pytest.approx(
        (1.008e12, 80e12, 40e12, 40e12), rel=0.01
    )
    del seen.memory_clock_rate
    assert cards._by_properties(seen) is None
    assert cards._by_properties(SimpleNamespace(**{**vars(seen), "major": 3})) is None


def test_measured_figures_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAME_SD_CARDS", str(tmp_path / "cards.json"))
    assert cards._measured("test") is None
    (tmp_path / "cards.json").write_text(json.dumps({"test": asdict(CARD), "old": {"speed": 1}}))
    assert cards._measured("test") == CARD
    assert cards._measured("old") is None


def test_a_device_may_be_taken_for_a_card_within_a_block() -> None:
    with cards.taken_for("cuda:99", CARD):
        assert cards.card_of("cuda:99") == CARD
    assert cards.card_of("cuda:99") is None  # there is none
    cards._found.clear()
