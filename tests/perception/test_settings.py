"""Which blocks merge how: arguments, defaults, settings that change, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mame_sd import MaMeConfig
from mame_sd.perception.apply_encoder import apply_encoder
from mame_sd.perception.settings import FIRST, LEFT, chosen_blocks, configs_of
from tests.builders.perception import DEPTH, VIT


@pytest.mark.parametrize(
    ("blocks", "chosen"),
    [(None, (0, 1, 2, 3)), (2, (0, 1)), ((3, 1), (1, 3)), ((-1,), (3,)), (range(1, 3), (1, 2))],
)
def test_blocks(blocks: Any, chosen: tuple[int, ...]) -> None:
    assert tuple(apply_encoder(VIT.build(), tau=0.8, blocks=blocks).configs) == chosen


def test_by_default_all_blocks_but_the_first_merge_and_the_last_leaves_a_quarter() -> None:
    for given in ({}, {"config": MaMeConfig()}, {"tau": None, "keep": None}):
        handle = apply_encoder(VIT.build(), **given)
        config = handle.config
        assert tuple(handle.configs) == (1, 2, 3)
        assert (config.tau, handle.prop_attn) == (None, True)
    assert tuple(apply_encoder(VIT.build(), tau=0.8).configs) == tuple(range(DEPTH)), "all"
    assert apply_encoder(VIT.build(), blocks=1).config.keep == pytest.approx(0.5), (
        "no less in one block"
    )
    assert chosen_blocks(None, 1, FIRST) == (0,)
    blocks = chosen_blocks(None, 27, FIRST)
    keeps = [config.keep or 0 for config in configs_of(None, {}, blocks).values()]
    assert blocks == tuple(range(1, 27))
    assert math.prod(keeps) == pytest.approx(LEFT)
    assert keeps == sorted(keeps)
    assert keeps[0] < keeps[-1]
    handle = apply_encoder(VIT.build(), MaMeConfig(keep=0.7))
    assert math.fsum(config.keep or 0 for config in handle.configs.values()) == pytest.approx(2.1)


def test_the_paper_s_method_is_by_tau_and_counts_no_sizes() -> None:
    given = {"config": MaMeConfig(tau=0.8)}
    handle = apply_encoder(VIT.build(), **given)
    config = handle.config
    assert (config.tau, config.keep, handle.prop_attn) == (0.8, None, False)
    assert tuple(handle.configs) == tuple(range(DEPTH))
    assert apply_encoder(VIT.build(), **given, prop_attn=True).prop_attn
    handle = apply_encoder(VIT.build())
    before = handle.configs
    handle.configs.clear()
    for change in (given, {"tau": 0.5}):
        with pytest.raises(ValueError, match="tau: expected the method that merging was applied"):
            handle.set(**change)
    assert handle.configs == before


def test_one_number_for_each_block() -> None:
    handle = apply_encoder(VIT.build(), keep=(0.5, 0.9), blocks=(0, 3))
    assert [config.keep for config in handle.configs.values()] == [0.5, 0.9]
    handle.set(keep=0.8)  # a share means the same applied and set
    assert handle.configs == apply_encoder(VIT.build(), keep=0.8, blocks=(0, 3)).configs
    handle.set(MaMeConfig())
    assert handle.configs == apply_encoder(VIT.build(), blocks=(0, 3)).configs
    handle.set(MaMeConfig(keep=1.0))
    assert {config.keep for config in handle.configs.values()} == {1.0}
    handle = apply_encoder(VIT.build(), tau=(0.8, 0.9), blocks=(0, 3))
    handle.set(tau=[0.5, 0.6])
    assert [config.tau for config in handle.configs.values()] == [0.5, 0.6]
    handle.set(MaMeConfig(tau=0.3), tau=0.1)
    assert [one.tau for one in handle.configs.values()] == [0.1] * 2
    with pytest.raises(
        ValueError, match="tau: expected one number, or one for each of 2 blocks, got 3"
    ):
        handle.set(tau=(0.1, 0.2, 0.3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({"blocks": blocks}, "blocks: expected")
            for blocks in (True, 0, 5, (), (4,), (1, -3), "two", (0.5,), [True], {1: 2})
        ),
        ({"restore": "no"}, "restore: expected True, False or None, got 'no'"),
        ({"prop_attn": "no"}, "prop_attn: expected True, False or None, got 'no'"),
        (
            {"layers": {"*": False}},
            "layers: expected none for a vision .*; it has keep, tau",
        ),
        ({"min_tokens": 9}, "min_tokens: expected none .*, got 9; it has"),
        ({"mlp_keep": 0.5}, "mlp_keep: expected none .*, got 0.5; it has"),
        ({"keep": True}, "keep: expected a share above 0 and at most 1, got True"),
        ({"tau": 2}, "tau: expected a number from -1 to 1"),
        ({"taw": 0.5}, "did you mean 'tau'"),
    ],
)
def test_settings_that_mean_nothing_here(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_encoder(VIT.build(), **fields)
