"""Layers that would win nothing on their card are left whole by default, and told of where settings
were given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention

from benchmarks.launches import CARD, counted, on_card, pretended
from mame_sd import MaMeAttnProcessor, MaMeConfig, apply_mame
from mame_sd.core.cards import CARDS, taken_for
from mame_sd.diffusion.handle import MaMeHandle
from mame_sd.diffusion.worth import _reckoned, leaves_open
from tests.builders.settings import nested
from tests.builders.tiny import tiny_unet, unet_inputs

H100, SLOW = CARDS["H100"], CARDS["GeForce RTX 3060"]


def layer(side: int, channels: int = 320, heads: int = 8) -> tuple[Attention, Any]:
    with torch.device("meta"):
        attention = Attention(channels, heads=heads, dim_head=channels // heads)
    attention = on_card(attention.half())
    return attention, lambda: attention(
        torch.empty(2, side * side, channels, dtype=torch.float16, device=CARD)
    )


@contextmanager
def merged(side: int, card: Any, **fields: Any) -> Iterator[tuple[MaMeHandle, int]]:
    attention, run = layer(side)
    with pretended():
        plain = len(counted(run))
    handle = apply_mame(attention, MaMeConfig(size=(side, side), **nested(fields)))
    with pretended(card=card):
        yield handle, len(counted(run)) - plain


def test_a_small_layer_is_left_whole_on_a_fast_card_and_the_report_says_so() -> None:
    with merged(32, H100) as (handle, more):
        assert more == 0
    (found,) = handle.report().layers
    assert (found.tokens_kept, found.reason) == (1024, "left whole: no gain reckoned on H100")
    assert "left whole" in str(handle.report())


def test_a_model_left_whole_launches_nothing_more() -> None:
    unet = tiny_unet()
    inputs = {name: value.to("meta") for name, value in unet_inputs(unet).items()}
    on_card(unet)
    with pretended():
        plain = len(counted(lambda: unet(**inputs)))
    handle = apply_mame(unet, MaMeConfig(min_tokens=16))
    with pretended(card=H100):
        first, second = (len(counted(lambda: unet(**inputs))) for _ in range(2))
        assert "left whole" in str(handle.report())
        assert (first > plain, second) == (True, plain)
        handle.set(keep=0.5)  # given, and so obeyed: the step is told again
        assert len(counted(lambda: unet(**inputs))) > first
    assert not any("left whole" in layer.reason for layer in handle.report().layers)


def test_a_large_layer_merges() -> None:
    with merged(128, SLOW) as (handle, more):
        assert more > 0
    (found,) = handle.report().layers
    assert (found.tokens_kept, found.reason) == (4096, "")


def test_settings_that_were_given_are_obeyed_with_the_same_words() -> None:
    with merged(32, H100, keep=0.25) as (handle, more):
        assert more > 0
    (found,) = handle.report().layers
    assert (found.tokens_kept, found.reason) == (256, "no gain reckoned on H100")


def test_cards_of_which_nothing_is_known_and_processors_merge_as_before() -> None:
    with merged(32, None) as (handle, more):
        assert more > 0
    attention = Attention(64, heads=4, dim_head=16)
    handle = apply_mame(attention)
    with torch.no_grad():
        attention(torch.randn(2, 1024, 64))
    assert handle.report().layers[0].tokens_kept == 256


def test_the_one_liner_leaves_layers_whole_too() -> None:
    attention, run = layer(32)
    attention.set_processor(MaMeAttnProcessor(min_tokens=64))
    with pretended(card=H100):
        counted(run)
    assert "left whole" in attention.processor.report().layers[0].reason


@pytest.mark.parametrize(
    "given", [{"keep": 0.5}, {"tau": 0.8}, {"preset": "plain"}, {"weights": "pick"}]
)
def test_what_merges_is_ours_to_say_where_nothing_of_it_is_given(given: dict[str, Any]) -> None:
    assert leaves_open(MaMeConfig(min_tokens=64, tiles=8))
    assert not leaves_open(MaMeConfig(**nested(given)))


def test_a_compiled_graph_holds_what_is_reckoned_whole() -> None:
    sizes = 2, 1024, 0, 320, 320, 8

    def call(x: torch.Tensor) -> torch.Tensor:
        return x + len(
            _reckoned(
                str(x.device),
                sizes,
                torch.float16,
                0.25,
                (False, True, "best", True, False, False),
                False,
            )
        )

    with taken_for("cpu", H100):
        compiled = torch.compile(call, backend="eager", fullgraph=True)
        assert compiled(torch.zeros(1)).item() == len("no gain reckoned on H100")
